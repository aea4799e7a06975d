"""The shared noise: published vectors, random access, and the same bits from MLX."""

import mlx.core as mx
import numpy as np
import pytest

from protocol.sampling.threefry import NoiseStream, gumbel, half_block, noise_bits, noise_key, threefry2x32, uniform

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
    for stream in NoiseStream:
        seed, position = int(generator.integers(1 << 32)), int(generator.integers(1 << 20))
        half = half_block(vocabulary)
        key = mx.array(noise_key(seed, position, stream), dtype=mx.uint32)
        native = np.array(mx.random.split(key, half).reshape(2 * half)[:vocabulary])

        ours = noise_bits(seed, position, np.arange(vocabulary), vocabulary, stream)

        assert np.array_equal(native, ours)


def test_the_bits_of_any_token_are_computed_alone():
    every = noise_bits(7, 99, np.arange(1000), 1000, NoiseStream.SAMPLE)
    some = np.array([999, 0, 511, 512, 3])

    assert np.array_equal(noise_bits(7, 99, some, 1000, NoiseStream.SAMPLE), every[some])


def test_differently_padded_vocabularies_share_their_noise():
    tokens = np.array([0, 70_000, 151_642])

    small = noise_bits(1, 5, tokens, 151_936, NoiseStream.SAMPLE)

    assert np.array_equal(small, noise_bits(1, 5, tokens, 152_064, NoiseStream.SAMPLE))


def test_seeds_positions_and_streams_do_not_share_bits():
    tokens = np.arange(64)
    rows = {
        noise_bits(seed, position, tokens, 64, stream).tobytes()
        for seed in (0, 1)
        for position in (0, 1, 2**20)
        for stream in NoiseStream
    }

    assert len(rows) == 2 * 3 * 4


def test_uniforms_stay_strictly_inside_the_unit_interval():
    extremes = uniform(np.array([0, _ONES], dtype=np.uint32))

    assert 0.0 < extremes[0] < 1e-6
    assert 1.0 - 1e-6 < extremes[1] < 1.0
    assert np.isfinite(gumbel(np.array([0, _ONES], dtype=np.uint32))).all()
