"""The shared noise in numpy: a counter-based generator with random access to each token's bits. Knows no MLX.

The order of the bits is that of `mx.random.split(key, half)`: MLX's generator is Threefry-2x32 over the counters
(i, i + half).
"""

from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint32]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_POSITION_BITS = 24
_PLACES = 253
"""Places in a block that have streams of their own. K is at most 64."""
_MASK = 0xFFFFFFFF


class NoiseStream(IntEnum):
    """The purpose of the noise at a position. Streams never share bits."""

    SAMPLE = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3
    """Of the first token of a block. Those behind it have the streams that follow: `draft_stream`."""


def draft_stream(place: int) -> int:
    """The stream that a draft draws a token from, `place` tokens behind the first one of its block.

    Whether a token of a block is accepted depends on the noise of those behind it, so a later block must not draw from
    it again. Position and place together name the root, and no two verified blocks have the same root.
    """
    return NoiseStream.DRAFT + place % _PLACES


def threefry2x32(key: tuple[int, "int | Words"], counters: tuple[Words, Words]) -> tuple[Words, Words]:
    """Threefry-2x32 with 20 rounds: two words for each pair of counters (any one shape, uint32). The second word of the
    key may be one for each.

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 4.2.
    """
    keys = [np.uint32(word) for word in (*key, key[0] ^ key[1] ^ _PARITY)]
    first, second = counters[0] + keys[0], counters[1] + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            first = first + second
            second = _rotated(second, rotation) ^ first
        injected = group + 1
        first = first + keys[injected % 3]
        second = second + keys[(injected + 1) % 3] + np.uint32(injected)
    return first, second


def noise_key(seed: int, position: int, stream: int) -> tuple[int, int]:
    """The generator's key for the token at absolute `position` (below 2^24) of a request with this seed. `stream`: a
    `NoiseStream` or `draft_stream`."""
    assert 0 <= position < 1 << _POSITION_BITS
    return seed & _MASK, position | stream << _POSITION_BITS


def half_block(vocabulary: int) -> int:
    """Blocks of a row of noise. The vocabulary is rounded up to a power of two: a model's padding does not change the
    noise."""
    return max(1, 1 << (vocabulary - 1).bit_length() >> 1)


def noise_bits(
    seed: int,
    position: int | npt.NDArray[np.integer],
    tokens: npt.NDArray[np.integer],
    vocabulary: int,
    stream: int | npt.NDArray[np.integer],
) -> Words:
    """The 32 random bits of each of `tokens` (ids below `vocabulary`), in their shape. `position` and `stream`: of all,
    or arrays that broadcast with them."""
    half = half_block(vocabulary)
    block = (tokens % half).astype(np.uint32)
    if isinstance(position, int) and isinstance(stream, int):
        key = noise_key(seed, position, stream)
    else:
        key = seed & _MASK, np.asarray(position, np.uint32) | np.asarray(stream, np.uint32) << np.uint32(_POSITION_BITS)
    first, second = threefry2x32(key, (block, block + np.uint32(half)))
    return np.where(tokens < half, first, second)


def uniform(bits: Words) -> npt.NDArray[np.float32]:
    """Uniform numbers strictly inside (0, 1), from the 23 high bits: exact in float32."""
    return ((bits >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def gumbel(bits: Words) -> npt.NDArray[np.float32]:
    """Standard Gumbel noise, -log(-log u)."""
    return -np.log(-np.log(uniform(bits)))


def _rotated(words: Words, bits: int) -> Words:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))
