"""Laws of the best entries and of the mass of long rows: those of a full sort, without one."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.sampling.top_tokens import log_total, top, top_values
from tests.support.logit_rows import logit_rows, rows, sorted_widths

_VOCABULARY = 151_936


@settings(max_examples=150)
@given(logits=logit_rows(), share=st.floats(0.0, 1.0))
def test_the_best_are_the_head_of_a_full_sort(logits: np.ndarray, share: float):
    width = logits.shape[-1]
    count = max(1, round(share**3 * width))
    ids, values = top(mx.array(logits), count)

    order = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    expected = np.take_along_axis(logits, order, axis=-1)
    finite = np.isfinite(expected)
    assert np.array_equal(np.array(ids)[finite], order[finite])
    assert np.array_equal(np.array(values), expected)
    assert np.array_equal(np.array(top_values(mx.array(logits), count)), expected)


def test_the_best_never_lie_in_the_padding():
    ids, _ = top(mx.full((2, 130), -mx.inf), 1)

    assert np.array(ids).max() < 130


@settings(max_examples=60)
@given(logits=logit_rows())
def test_the_mass_is_that_of_float64_and_does_not_depend_on_the_rows_beside_it(logits: np.ndarray):
    totals = np.array(log_total(mx.array(logits)))

    expected = np.logaddexp.reduce(logits.astype(np.float64), axis=-1)
    assert totals[:, 0] == pytest.approx(expected, abs=1e-4)
    for row in range(len(logits)):
        assert np.array_equal(np.array(log_total(mx.array(logits[row : row + 1]))), totals[row : row + 1])


def test_a_row_without_mass_has_none():
    assert log_total(mx.full((1, 9), -mx.inf)).item() == -np.inf


@pytest.mark.parametrize("count", [1, 8, 64, 256, 1000])
def test_no_sort_is_as_wide_as_a_vocabulary(count: int):
    logits = mx.array(rows("normal", 1, _VOCABULARY, seed=count))
    with sorted_widths() as widths:
        mx.eval(top(logits, count), top_values(logits, count))

    assert widths
    assert max(widths) < 2 * np.sqrt(2 * _VOCABULARY * count)
    assert max(widths) < _VOCABULARY / 6
