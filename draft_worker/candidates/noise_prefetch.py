"""The shared noise of whole positions, begun before it is needed. Knows no logits and no tree.

Many tree nodes share a position, and their draft's forward leaves the processor idle: so a position's random
bits are drawn once, on a thread of MLX's own, while the forward runs. Only tokens that may win are turned
from bits into noise.
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
Heights = npt.NDArray[np.float32]

_CACHE_BYTES = 32 << 20
_FEWEST = 32
"""Positions kept at least: those that one tree spans."""
_PEAK_BITS = np.uint32(math.ceil(math.exp(-math.exp(-4.0)) * 2**23) << 9)
"""Bits from here on make noise above 4; of a vocabulary, 1.8% do."""
PEAK = float(gumbel(np.array([_PEAK_BITS - np.uint32(1)]))[0])
"""The most that noise can be without being a peak."""


class PositionNoise:
    """Standard Gumbel noise of one position: a function of the token."""

    def __init__(self, bits: Words) -> None:
        self._bits = bits

    def at(self, tokens: Ids) -> Heights:
        return gumbel(self._bits[tokens])

    @cached_property
    def peaks(self) -> Ids:
        """Tokens, ascending, whose noise is above PEAK."""
        return np.flatnonzero(self._bits >= _PEAK_BITS)

    @cached_property
    def heights(self) -> Heights:
        """The noise of the peaks."""
        return self.at(self.peaks)


class NoisePrefetch:
    """Noise of recent positions, for a target of `vocabulary` tokens of which the first `width` are wanted."""

    def __init__(self, vocabulary: int, width: int) -> None:
        self._half = half_block(vocabulary)
        self._width = width
        self._limit = max(_FEWEST, _CACHE_BYTES // (8 * self._half))
        self._stream = mx.new_stream(mx.cpu)
        self._begun: OrderedDict[tuple[int, int], mx.array] = OrderedDict()
        self._known: dict[tuple[int, int], PositionNoise] = {}

    def begin(self, seed: int, positions: Iterable[int]) -> None:
        """Start drawing what is not drawn yet."""
        fresh = []
        for position in dict.fromkeys(positions):
            key = noise_key(seed, position, NoiseStream.SAMPLE)
            if key not in self._begun:
                words = mx.random.split(mx.array(key, dtype=mx.uint32), self._half, stream=self._stream)
                self._begun[key] = words
                fresh.append(words)
            self._begun.move_to_end(key)
        mx.async_eval(fresh)
        while len(self._begun) > self._limit:
            oldest, _ = self._begun.popitem(last=False)
            self._known.pop(oldest, None)

    def position(self, seed: int, position: int) -> PositionNoise:
        """The noise for the token at absolute `position`."""
        self.begin(seed, (position,))
        key = noise_key(seed, position, NoiseStream.SAMPLE)
        if key not in self._known:
            self._known[key] = PositionNoise(np.asarray(self._begun[key]).reshape(-1)[: self._width])
        return self._known[key]
