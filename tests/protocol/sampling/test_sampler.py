"""Laws of scores: the noise is the reference's, and samples follow the distribution."""

import mlx.core as mx
import numpy as np
import pytest

from protocol.errors import PipelineError
from protocol.messages.sampling import Sampling
from protocol.sampling import sampler as module
from protocol.sampling.sampler import Noise, scores
from protocol.sampling.threefry import NoiseStream, gumbel, noise_bits

_VOCABULARY = 100


def _logits(rows: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(scale=2.0, size=(rows, _VOCABULARY)).astype(np.float32))


def test_noise_rows_equal_the_reference():
    for stream in NoiseStream:
        expected = gumbel(noise_bits(5, 77, np.arange(_VOCABULARY), _VOCABULARY, stream))

        assert np.allclose(np.array(Noise(_VOCABULARY).row(5, 77, stream)), expected, rtol=1e-4, atol=1e-4)


def test_the_noise_of_a_token_does_not_depend_on_the_tokens_of_a_row():
    tokens = np.array([0, 3, 17, _VOCABULARY - 1])
    whole = np.array(Noise(_VOCABULARY).row(5, 77, NoiseStream.SAMPLE))

    assert np.array_equal(np.array(Noise(_VOCABULARY, tokens=tokens).row(5, 77, NoiseStream.SAMPLE)), whole[tokens])


def test_an_evicted_row_is_drawn_alike_again(monkeypatch: pytest.MonkeyPatch):
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


def test_half_precision_logits_become_float32_first():
    result = scores(_logits(1).astype(mx.float16), [4], Sampling(temperature=0.7), Noise(_VOCABULARY))

    assert result.dtype == mx.float32


def test_greedy_scores_are_the_logits():
    logits = _logits(2)

    assert np.array_equal(np.array(scores(logits, [1, 2], Sampling(), Noise(_VOCABULARY))), np.array(logits))


def test_samples_follow_the_distribution():
    logits, sampling, noise = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]])), Sampling(temperature=1.0, seed=2), Noise(4)
    draws = 4000
    picks = mx.argmax(scores(mx.broadcast_to(logits, (draws, 4)), range(draws), sampling, noise), axis=-1)
    counts = np.bincount(np.array(picks), minlength=4)
    expected = draws * np.array([0.5, 0.3, 0.15, 0.05])

    assert ((counts - expected) ** 2 / expected).sum() < 16.27, "chi-square, 3 degrees of freedom, p < 0.001"
