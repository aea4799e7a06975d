"""Scores from processed logits: temperature and the shared noise. Their argmax is the sampled token.

Knows no trees, no models and no message flow. All arithmetic is float32 and row by row, so the number of rows does not
change a row's result.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.errors import PipelineError
from protocol.messages.sampling import Sampling
from protocol.sampling.threefry import Floats, gumbel, half_block, noise_bits, noise_key, noise_row
from protocol.sampling.top_tokens import on_host

_CACHE_BYTES = 64 << 20
_CACHE_ROWS = 32
"""The cache keeps at least this many rows: the positions that one tree spans, however large the vocabulary."""
_begin: Callable[..., None] = vars(mx)["async_eval"]
"""`mx.async_eval`, whose arguments MLX's own annotations leave out."""
_AHEAD = 2
"""Rows that are drawn ahead: behind the root and behind its child. Later rounds use those that this one does not."""
_PROBE = (0x9E3779B9, 1234)
"""The seed and position at which MLX's generator is compared with `threefry`."""


class NoiseRows(Protocol):
    """Standard Gumbel noise of some tokens, a row a position."""

    def row(self, seed: int, position: int) -> mx.array: ...


class Noise:
    """Standard Gumbel noise g(seed, position, token), one row per vocabulary, on MLX's device.

    Many tree nodes and rounds share a position, so recent rows are cached.
    Raises PipelineError if MLX's order of random bits differs from that of `protocol.sampling.threefry`.
    """

    def __init__(
        self, vocabulary: int, width: int | None = None, *, tokens: npt.NDArray[np.integer] | None = None
    ) -> None:
        """The target's `vocabulary` decides the layout. A row holds `tokens`, or the first `width` ones (None: all)."""
        self.vocabulary = vocabulary
        self._tokens = np.arange(vocabulary if width is None else width) if tokens is None else tokens
        self._chosen = None if tokens is None else mx.array(tokens)
        self._half = half_block(vocabulary)
        self._limit = max(_CACHE_ROWS, _CACHE_BYTES // (4 * vocabulary))
        self._rows: OrderedDict[tuple[int, int], mx.array] = OrderedDict()
        self._require_known_layout()

    def row(self, seed: int, position: int) -> mx.array:
        """(V,) float32 for the token at absolute `position`. A new row may not be computed yet."""
        key = noise_key(seed, position)
        row = self._rows.pop(key, None)
        if row is None:
            row = self._draw(key)
            if len(self._rows) >= self._limit:
                self._rows.popitem(last=False)
        self._rows[key] = row
        return row

    def draw_ahead(self, seed: int, position: int) -> None:
        """Begin to compute the rows from `position` on that most rounds read, while the device has nothing to do."""
        _begin(*(self.row(seed, position + ahead) for ahead in range(_AHEAD)))

    def _draw(self, key: tuple[int, int]) -> mx.array:
        drawn = noise_row(*key, self.vocabulary) if on_host() else None
        if drawn is not None:
            return mx.array(drawn[: len(self._tokens)] if self._chosen is None else drawn[self._tokens])
        bits = mx.flatten(mx.random.split(mx.array(key, dtype=mx.uint32), self._half))
        bits = bits[: len(self._tokens)] if self._chosen is None else bits[self._chosen]
        uniform = ((bits >> 9).astype(mx.float32) + 0.5) * 2.0**-23
        return -mx.log(-mx.log(uniform))

    def _require_known_layout(self) -> None:
        places = np.unique(np.linspace(0, len(self._tokens) - 1, 8, dtype=np.int64))
        expected = gumbel(noise_bits(*_PROBE, self._tokens[places], self.vocabulary))
        row = self._draw(noise_key(*_PROBE))
        if not np.allclose(np.array(row[mx.array(places)], np.float32), expected, rtol=1e-4, atol=1e-4):
            raise PipelineError(
                f"MLX {version('mlx')} draws random bits in an order that this release does not support: "
                "install the MLX version in requirements.lock."
            )


def scores(logits: mx.array, positions: Sequence[int], sampling: Sampling, noise: NoiseRows) -> mx.array:
    """(L, V) float32: the argmax of row i is the token sampled at absolute position `positions[i]`.

    `logits`: (L, V), already processed. The Gumbel-max trick: argmax(log p + g) is distributed as p. At temperature
    0 the scores are the logits.
    """
    logits = logits.astype(mx.float32)
    if sampling.greedy:
        return logits
    rows = [noise.row(sampling.seed, position) for position in positions]
    return logits / sampling.temperature + mx.stack(rows)


def sampled(logits: mx.array, positions: Sequence[int], sampling: Sampling, noise: NoiseRows) -> mx.array:
    """(L,) int32: the argmax of `scores`, on a processor by numpy, which has vector code for it."""
    if not on_host():
        return mx.argmax(scores(logits, positions, sampling, noise), axis=-1).astype(mx.int32)
    numbers: Any = logits.astype(mx.float32)
    found: Floats = np.asarray(numbers)
    if not sampling.greedy:
        found = np.divide(found, sampling.temperature, dtype=np.float32)
        for row, position in zip(found, positions, strict=True):
            row += np.asarray(noise.row(sampling.seed, position))
    return mx.array(found.argmax(axis=-1).astype(np.int32))
