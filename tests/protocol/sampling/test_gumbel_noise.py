"""Laws of scores and of the shared noise: published vectors, MLX's bits, samples that follow the distribution."""

import mlx.core as mx
import numpy as np
import pytest

from protocol.errors import PipelineError
from protocol.messages.sampling import Sampling
from protocol.sampling import gumbel_noise as module
from protocol.sampling.gumbel_noise import Noise, sampled, scores
from protocol.sampling.threefry import gumbel, half_block, noise_bits, noise_key, threefry2x32, uniform

_VOCABULARY = 100


def _logits(rows: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(scale=2.0, size=(rows, _VOCABULARY)).astype(np.float32))


def test_noise_rows_equal_the_reference():
    expected = gumbel(noise_bits(5, 77, np.arange(_VOCABULARY), _VOCABULARY))

    assert np.allclose(np.array(Noise(_VOCABULARY).row(5, 77)), expected, rtol=1e-4, atol=1e-4)


def test_the_noise_of_a_token_does_not_depend_on_the_tokens_of_a_row():
    tokens = np.array([0, 3, 17, _VOCABULARY - 1])
    whole = np.array(Noise(_VOCABULARY).row(5, 77))

    assert np.array_equal(np.array(Noise(_VOCABULARY, tokens=tokens).row(5, 77)), whole[tokens])


def test_an_evicted_row_is_drawn_alike_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_CACHE_BYTES", 0)
    monkeypatch.setattr(module, "_CACHE_ROWS", 2)
    noise = Noise(_VOCABULARY)
    before = np.array(noise.row(1, 0))
    for position in range(1, 10):
        noise.row(1, position)

    assert len(noise._rows) == 2
    assert np.array_equal(np.array(noise.row(1, 0)), before)


def test_a_row_that_is_drawn_ahead_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch):
    noise, later = Noise(_VOCABULARY), Noise(_VOCABULARY)
    noise.draw_ahead(5, 77)
    monkeypatch.setattr(noise, "_draw", lambda _: pytest.fail("drawn again"))

    for position in (77, 78):
        row = noise.row(5, position)
        assert np.array_equal(np.array(row), np.array(later.row(5, position)))


def test_an_unknown_bit_layout_is_refused(monkeypatch: pytest.MonkeyPatch):
    split = mx.random.split
    monkeypatch.setattr(mx.random, "split", lambda key, num: split(key, num)[::-1])

    with pytest.raises(PipelineError, match="install the MLX version"):
        Noise(_VOCABULARY)


def test_half_precision_logits_become_float32_first():
    result = scores(_logits(1).astype(mx.float16), [4], Sampling(temperature=0.7), Noise(_VOCABULARY))

    assert result.dtype == mx.float32


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_sampled_token_has_the_best_score(temperature: float):
    logits, sampling, noise = _logits(5), Sampling(temperature=temperature, seed=3), Noise(_VOCABULARY)
    best = np.array(scores(logits, range(5), sampling, noise)).argmax(axis=-1)

    assert np.array_equal(np.array(sampled(logits, range(5), sampling, noise)), best)
    assert np.array_equal(np.array(sampled(logits[3:4], [3], sampling, noise)), best[3:4])


def test_samples_follow_the_distribution():
    logits, sampling, noise = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]])), Sampling(temperature=1.0, seed=2), Noise(4)
    draws = 4000
    picks = mx.argmax(scores(mx.broadcast_to(logits, (draws, 4)), range(draws), sampling, noise), axis=-1)
    counts = np.bincount(np.array(picks), minlength=4)
    expected = draws * np.array([0.5, 0.3, 0.15, 0.05])

    assert ((counts - expected) ** 2 / expected).sum() < 16.27, "chi-square, 3 degrees of freedom, p < 0.001"


_ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((_ONES, _ONES), (_ONES, _ONES), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_published_known_answers(key: tuple[int, int], counter: tuple[int, int], expected: tuple[int, int]):
    first, second = threefry2x32(key, (np.array(counter[:1], dtype=np.uint32), np.array(counter[1:], dtype=np.uint32)))

    assert (int(first[0]), int(second[0])) == expected


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 16, 1000, 4096, 4097])
def test_mlx_lays_out_the_same_bits(vocabulary: int):
    generator = np.random.default_rng(vocabulary)
    seed, position = int(generator.integers(1 << 32)), int(generator.integers(1 << 20))
    half = half_block(vocabulary)
    key = mx.array(noise_key(seed, position), dtype=mx.uint32)
    native = np.array(mx.random.split(key, half).reshape(2 * half)[:vocabulary])

    assert np.array_equal(native, noise_bits(seed, position, np.arange(vocabulary), vocabulary))


def test_differently_padded_vocabularies_share_their_noise():
    tokens = np.array([0, 70_000, 151_642])

    small = noise_bits(1, 5, tokens, 151_936)

    assert np.array_equal(small, noise_bits(1, 5, tokens, 152_064))


def test_seeds_and_positions_do_not_share_bits():
    tokens = np.arange(64)
    rows = {noise_bits(seed, position, tokens, 64).tobytes() for seed in (0, 1) for position in (0, 1, 2**20)}

    assert len(rows) == 2 * 3


def test_uniforms_stay_strictly_inside_the_unit_interval():
    extremes = uniform(np.array([0, _ONES], dtype=np.uint32))

    assert 0.0 < extremes[0] < 1e-6
    assert 1.0 - 1e-6 < extremes[1] < 1.0
    assert np.isfinite(gumbel(np.array([0, _ONES], dtype=np.uint32))).all()
