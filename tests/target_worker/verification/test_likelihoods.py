"""Laws of log-probabilities: the softmax of the model's own logits, best first."""

import mlx.core as mx
import numpy as np
import pytest

from target_worker.verification.acceptance import likelihoods
from tests.support.logit_rows import rows, sorted_widths


@pytest.mark.parametrize("kind", ["normal", "tied", "half"])
@pytest.mark.parametrize("width", [100, 5000])
def test_the_best_are_the_head_of_a_stable_sort(kind: str, width: int):
    logits = rows(kind, 3, width, seed=2)
    logs = logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(np.float64), axis=-1)[:, None]

    found = likelihoods(mx.array(logits), (2, 0), (4, 9), count=20)

    for each, row, token in zip(found, (2, 0), (4, 9), strict=True):
        order = np.argsort(-logits[row], kind="stable")[:20]
        assert each.chosen == pytest.approx(logs[row, token], abs=1e-4)
        assert [id for id, _ in each.best] == order.tolist()
        assert [log for _, log in each.best] == pytest.approx(logs[row, order].tolist(), abs=1e-4)


def test_without_alternatives_nothing_is_sorted():
    with sorted_widths() as widths:
        (found,) = likelihoods(mx.array(rows("normal", 1, 100, seed=2)), (0,), (4,), count=0)

    assert found.best == ()
    assert widths == []


def test_alternatives_beyond_a_small_vocabulary_are_all_tokens():
    (found,) = likelihoods(mx.array([[0.0, 2.0, 1.0]]), (0,), (1,), count=20)

    assert [id for id, _ in found.best] == [1, 2, 0]


def test_a_certain_token_has_no_more_than_certainty():
    (found,) = likelihoods(mx.array([[0.0, 500.0]]), (0,), (1,), count=2)

    assert found.chosen == 0.0
    assert all(log <= 0.0 for _, log in found.best)
