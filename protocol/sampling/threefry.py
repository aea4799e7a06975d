"""The shared noise on the processor: a counter-based generator with random access to each token's bits. Knows no MLX.

The order of the bits is that of `mx.random.split(key, half)`: MLX's generator is Threefry-2x32 over the counters
(i, i + half).
"""

import ctypes
import functools
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint32]

Floats: TypeAlias = npt.NDArray[np.float32]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_POSITION_BITS = 24
_MASK = 0xFFFFFFFF
_LANES = 16
"""Numbers of a vector of the library."""


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


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """The generator's key for the token at absolute `position` (below 2^24) of a request with this seed."""
    assert 0 <= position < 1 << _POSITION_BITS
    return seed & _MASK, position


def half_block(vocabulary: int) -> int:
    """Blocks of a row of noise. The vocabulary is rounded up to a power of two: a model's padding does not change the
    noise."""
    return max(1, 1 << (vocabulary - 1).bit_length() >> 1)


def noise_bits(
    seed: int,
    position: int | npt.NDArray[np.integer],
    tokens: npt.NDArray[np.integer],
    vocabulary: int,
) -> Words:
    """The 32 random bits of each of `tokens` (ids below `vocabulary`), in their shape. `position`: of all, or an array
    that broadcasts with them."""
    half = half_block(vocabulary)
    block = (tokens % half).astype(np.uint32)
    key = noise_key(seed, position) if isinstance(position, int) else (seed & _MASK, np.asarray(position, np.uint32))
    first, second = threefry2x32(key, (block, block + np.uint32(half)))
    return np.where(tokens < half, first, second)


def noise_row(seed: int, position: int, vocabulary: int) -> Floats | None:
    """(vocabulary,): the noise of every token, as `gumbel` of `noise_bits`, in a sixth of the time that MLX takes on a
    processor (`bridge_noise` in orchestrator/machine/blas/bridge.c). None without that library, or of so few tokens."""
    half, kernel = half_block(vocabulary), _library_noise()
    if kernel is None or half < _LANES:
        return None
    row = np.empty(2 * half, np.float32)
    kernel(*noise_key(seed, position), half, row.ctypes.data)
    return row[:vocabulary]


@functools.cache
def _library_noise() -> Callable[..., int] | None:
    library = ctypes.CDLL(None)
    if not hasattr(library, "bridge_noise"):
        return None
    kernel = library.bridge_noise
    kernel.argtypes = [*[ctypes.c_uint32] * 3, ctypes.c_void_p]
    return kernel if kernel(0, 0, 0, None) else None


def uniform(bits: Words) -> Floats:
    """Uniform numbers strictly inside (0, 1), from the 23 high bits: exact in float32."""
    return ((bits >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def gumbel(bits: Words) -> Floats:
    """Standard Gumbel noise, -log(-log u)."""
    return -np.log(-np.log(uniform(bits)))


def _rotated(words: Words, bits: int) -> Words:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))
