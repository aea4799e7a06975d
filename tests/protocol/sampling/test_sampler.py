"""Scores: filters against plain numpy, noise against its reference, and rows that stand alone."""

import mlx.core as mx
import numpy as np
import pytest

from protocol.errors import PipelineError
from protocol.messages.sampling import Sampling
from protocol.sampling import sampler as module
from protocol.sampling.sampler import Noise, filtered, scores
from protocol.sampling.threefry import NoiseStream, gumbel, noise_bits

_VOCABULARY = 100
_EVERYTHING = Sampling(
    temperature=0.8,
    top_k=40,
    top_p=0.9,
    min_p=0.02,
    logit_bias=((3, 2.0), (9_999, 5.0)),
    repetition_penalty=1.3,
    seed=11,
)


def _logits(rows: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(scale=2.0, size=(rows, _VOCABULARY)).astype(np.float32))


def _kept(row: mx.array) -> set[int]:
    return set(np.flatnonzero(np.isfinite(np.array(row))).tolist())


def _softmax(row: mx.array) -> np.ndarray:
    exponentials = np.exp(np.array(row, dtype=np.float64))
    return exponentials / exponentials.sum()


def test_noise_rows_equal_the_reference():
    for stream in NoiseStream:
        expected = gumbel(noise_bits(5, 77, np.arange(_VOCABULARY), _VOCABULARY, stream))

        assert np.allclose(np.array(Noise(_VOCABULARY).row(5, 77, stream)), expected, rtol=1e-4, atol=1e-4)


def test_a_forgotten_row_comes_back_unchanged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_CACHE_BYTES", 0)
    monkeypatch.setattr(module, "_CACHE_ROWS", 2)
    noise = Noise(_VOCABULARY)
    before = np.array(noise.row(1, 0, NoiseStream.SAMPLE))
    for position in range(1, 10):
        noise.row(1, position, NoiseStream.SAMPLE)

    assert len(noise._rows) == 2
    assert np.array_equal(np.array(noise.row(1, 0, NoiseStream.SAMPLE)), before)


def test_an_unknown_bit_layout_is_refused(monkeypatch: pytest.MonkeyPatch):
    split = mx.random.split
    monkeypatch.setattr(mx.random, "split", lambda key, num: split(key, num)[::-1])

    with pytest.raises(PipelineError, match="install the MLX version"):
        Noise(_VOCABULARY)


def test_default_sampling_leaves_logits_alone():
    logits = _logits(3)

    assert np.array_equal(np.array(filtered(logits, Sampling(), ((), (), ()))), np.array(logits))


def test_half_precision_logits_become_float32_first():
    result = scores(_logits(1).astype(mx.float16), [4], Sampling(temperature=0.7), ((),), Noise(_VOCABULARY))

    assert result.dtype == mx.float32


def test_greedy_scores_are_the_biased_logits():
    logits = _logits(2)
    biased = np.array(logits)
    biased[:, 7] += 4.0

    result = scores(logits, [1, 2], Sampling(logit_bias=((7, 4.0),), top_k=2), ((), ()), Noise(_VOCABULARY))

    assert np.allclose(np.array(result), biased)


def test_bias_for_an_unknown_token_is_ignored():
    logits = _logits(1)

    result = filtered(logits, Sampling(logit_bias=((_VOCABULARY, 9.0),)), ((),))

    assert np.array_equal(np.array(result), np.array(logits))


def test_repetition_penalty_reads_the_recent_part_of_each_row_s_own_context():
    logits = mx.array([[2.0, -2.0, 1.0, 3.0], [2.0, -2.0, 1.0, 3.0]])
    sampling = Sampling(repetition_penalty=2.0, repetition_context=2)

    result = filtered(logits, sampling, ((3, 0, 1, 1, 0), (2, 0, 2)))

    assert np.array(result).tolist() == [[1.0, -4.0, 1.0, 3.0], [1.0, -2.0, 0.5, 3.0]]


def test_top_k_keeps_the_k_largest():
    (row,) = _logits(1)

    assert _kept(filtered(row[None], Sampling(top_k=5), ((),))[0]) == set(np.argsort(np.array(row))[-5:].tolist())


def test_top_k_keeps_all_that_tie_at_the_threshold():
    assert _kept(filtered(mx.array([[1.0, 3.0, 2.0, 2.0]]), Sampling(top_k=2), ((),))[0]) == {1, 2, 3}


def test_top_k_beyond_the_vocabulary_keeps_everything():
    assert len(_kept(filtered(_logits(1), Sampling(top_k=_VOCABULARY + 1), ((),))[0])) == _VOCABULARY


def test_top_p_keeps_the_smallest_head_that_reaches_p():
    (row,) = _logits(1)
    order = np.argsort(-_softmax(row))
    size = int(np.searchsorted(np.cumsum(_softmax(row)[order]), 0.7)) + 1

    assert _kept(filtered(row[None], Sampling(top_p=0.7), ((),))[0]) == set(order[:size].tolist())


def test_min_p_keeps_what_reaches_its_share_of_the_best():
    (row,) = _logits(1)
    probabilities = _softmax(row)

    expected = set(np.flatnonzero(probabilities >= 0.1 * probabilities.max()).tolist())
    assert _kept(filtered(row[None], Sampling(min_p=0.1), ((),))[0]) == expected


def test_top_p_counts_mass_among_what_top_k_left():
    logits = mx.log(mx.array([[0.4, 0.2, 0.2, 0.1, 0.1]]))

    assert _kept(filtered(logits, Sampling(top_k=3, top_p=0.45), ((),))[0]) == {0}


def test_filters_work_on_the_unscaled_distribution():
    logits = _logits(1)
    cold, hot = (filtered(logits, Sampling(temperature=t, top_p=0.5), ((),)) for t in (0.1, 10.0))

    assert _kept(cold[0]) == _kept(hot[0])


def test_what_is_filtered_is_never_sampled():
    logits, sampling = _logits(1), Sampling(temperature=50.0, top_k=3)
    noise, allowed = Noise(_VOCABULARY), _kept(filtered(logits, Sampling(top_k=3), ((),))[0])

    picks = {int(mx.argmax(scores(logits, [position], sampling, ((),), noise))) for position in range(50)}

    assert picks == allowed


def test_a_row_does_not_depend_on_the_rows_beside_it():
    logits, noise = _logits(9), Noise(_VOCABULARY)
    contexts = [list(range(row, row + 30)) for row in range(9)]
    together = np.array(scores(logits, range(50, 59), _EVERYTHING, contexts, noise))

    for row in range(9):
        alone = scores(logits[row : row + 1], [50 + row], _EVERYTHING, contexts[row : row + 1], noise)
        assert np.array_equal(np.array(alone)[0], together[row])


def test_samples_follow_the_distribution():
    logits, sampling, noise = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]])), Sampling(temperature=1.0, seed=2), Noise(4)
    draws = 4000
    picks = mx.argmax(scores(mx.broadcast_to(logits, (draws, 4)), range(draws), sampling, [()] * draws, noise), axis=-1)
    counts = np.bincount(np.array(picks), minlength=4)
    expected = draws * np.array([0.5, 0.3, 0.15, 0.05])

    assert ((counts - expected) ** 2 / expected).sum() < 16.27, "chi-square, 3 degrees of freedom, p < 0.001"
