"""Laws of the logits processors: filters against plain numpy, and rows that depend only on their paths."""

import mlx.core as mx
import msgspec
import numpy as np

from protocol.messages.sampling import Sampling
from protocol.sampling.logits_processors import FILTERS
from tests.support.processing import processed, processors

_VOCABULARY = 100
_EVERYTHING = Sampling(
    temperature=0.8,
    top_k=40,
    top_p=0.9,
    min_p=0.02,
    logit_bias=((3, 2.0), (9_999, 5.0)),
    repetition_penalty=1.3,
    frequency_penalty=0.7,
    presence_penalty=-0.3,
    seed=11,
)


def _logits(rows: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(scale=2.0, size=(rows, _VOCABULARY)).astype(np.float32))


def _kept(row: mx.array) -> set[int]:
    return set(np.flatnonzero(np.isfinite(np.array(row))).tolist())


def test_bias_for_an_unknown_token_is_ignored():
    logits = _logits(1)

    result = processed(logits, Sampling(logit_bias=((_VOCABULARY, 9.0),)))

    assert np.array_equal(np.array(result), np.array(logits))


def test_repetition_penalty_reads_the_recent_part_of_each_row_s_own_path():
    logits = mx.array([[2.0, -2.0, 1.0, 3.0], [2.0, -2.0, 1.0, 3.0]])
    sampling = Sampling(repetition_penalty=2.0, repetition_context=2)

    result = processed(logits, sampling, (3, 0), ((1, 1, 0), (2,)))

    assert np.array(result).tolist() == [[1.0, -4.0, 1.0, 3.0], [1.0, -2.0, 0.5, 3.0]]


def test_moving_the_root_equals_a_path():
    logits = mx.broadcast_to(_logits(1), (3, _VOCABULARY))
    before, after = (processors(_EVERYTHING, (1, 2, 3, 4), prompt=2) for _ in range(2))
    assert before is not None
    assert after is not None
    after.advance((5, 6))

    ahead = before.apply(logits, ((5, 6), (5, 6, 7), (5, 6, 7, 5)))

    assert np.array_equal(np.array(ahead), np.array(after.apply(logits, ((), (7,), (7, 5)))))


def test_top_p_counts_mass_among_what_top_k_left():
    logits = mx.log(mx.array([[0.4, 0.2, 0.2, 0.1, 0.1]]))

    assert _kept(processed(logits, Sampling(temperature=1.0, top_k=3, top_p=0.45))[0]) == {0}


def test_filters_work_on_the_unscaled_distribution():
    logits = _logits(1)
    cold, hot = (processed(logits, Sampling(temperature=t, top_p=0.5)) for t in (0.1, 10.0))

    assert _kept(cold[0]) == _kept(hot[0])


def test_no_filter_is_applied_at_temperature_0():
    cold = Sampling(top_k=2, top_p=0.5, min_p=0.5)
    hot = msgspec.structs.replace(cold, temperature=1.0)

    assert all(each.wanted(hot) for each in FILTERS)
    assert processors(cold) is None


def test_a_row_does_not_depend_on_the_rows_beside_it():
    logits, history = _logits(9), range(40)
    paths = [list(range(row, row + 30)) for row in range(9)]
    together = np.array(processed(logits, _EVERYTHING, history, paths))

    for row in range(9):
        alone = processed(logits[row : row + 1], _EVERYTHING, history, paths[row : row + 1])
        assert np.array_equal(np.array(alone)[0], together[row])


def test_a_bias_changes_greedy_logits_too():
    biased = np.array(_logits(2))
    biased[:, 7] += 4.0

    assert np.allclose(np.array(processed(_logits(2), Sampling(logit_bias=((7, 4.0),), top_k=2))), biased)
