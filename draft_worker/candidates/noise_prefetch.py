"""Draws the shared noise of whole positions before it is needed. Knows no logits and no tree.

Many tree nodes share a position, and the forward on the device leaves the CPU idle. So MLX draws the random bits of a
position once, in a CPU stream, while the forward runs. Only the bits of tokens that can become candidates are turned
into noise.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.sampling.threefry import NoiseStream, Words, gumbel, half_block, noise_key

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_CACHE_BYTES = 32 << 20
_MIN_POSITIONS = 32
"""The cache keeps at least this many positions: those that one tree spans."""
_PEAK_BITS = np.uint32(math.ceil(math.exp(-math.exp(-4.0)) * 2**23) << 9)
"""Bits at or above this value give noise above 4. 1.8% of a vocabulary's tokens have such bits."""
PEAK = float(gumbel(np.array([_PEAK_BITS - np.uint32(1)]))[0])
"""Noise above this value is a peak."""


class PositionNoise:
    """Standard Gumbel noise of one position, as a function of the column of the logits."""

    def __init__(self, bits: Words, high: npt.NDArray[np.bool_]) -> None:
        """`high`: where the bits are those of a peak."""
        self._bits = bits
        self._high = high

    def at(self, columns: Ids) -> Floats:
        return gumbel(self._bits[columns])

    @cached_property
    def peaks(self) -> Ids:
        """Columns, ascending, whose noise is above PEAK."""
        return np.flatnonzero(self._high)

    @cached_property
    def peak_values(self) -> Floats:
        """The noise of `peaks`."""
        return self.at(self.peaks)


class NoisePrefetch:
    """Noise of recent positions for the first `width` tokens of a target's `vocabulary`, or for `tokens` of them."""

    def __init__(self, vocabulary: int, width: int, tokens: npt.NDArray[np.integer] | None = None) -> None:
        self._half = half_block(vocabulary)
        self._chosen = slice(width) if tokens is None else mx.array(tokens)
        self._limit = max(_MIN_POSITIONS, _CACHE_BYTES // (8 * self._half))
        self._stream = mx.new_stream(mx.cpu)
        self._words: OrderedDict[tuple[int, int], tuple[mx.array, mx.array]] = OrderedDict()
        self._noises: dict[tuple[int, int], PositionNoise] = {}

    def begin(self, seed: int, positions: Iterable[int]) -> None:
        """Start to draw the bits of those positions that are not cached."""
        started = []
        for position in dict.fromkeys(positions):
            key = noise_key(seed, position, NoiseStream.SAMPLE)
            if key not in self._words:
                with mx.stream(self._stream):
                    bits = mx.random.split(mx.array(key, dtype=mx.uint32), self._half).reshape(-1)[self._chosen]
                    drawn = bits, bits >= mx.array(int(_PEAK_BITS), mx.uint32)
                self._words[key] = drawn
                started.extend(drawn)
            self._words.move_to_end(key)
        mx.async_eval(started)
        while len(self._words) > self._limit:
            oldest, _ = self._words.popitem(last=False)
            self._noises.pop(oldest, None)

    def position(self, seed: int, position: int) -> PositionNoise:
        """The noise for the token at absolute `position`."""
        self.begin(seed, (position,))
        key = noise_key(seed, position, NoiseStream.SAMPLE)
        if key not in self._noises:
            self._noises[key] = PositionNoise(*map(np.asarray, self._words[key]))
        return self._noises[key]
