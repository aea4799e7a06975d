"""Candidates from logits on the host, without a sort and with noise that was drawn before it is needed.

A token's score is logit / T plus Gumbel noise. In a long row the best tokens have a high logit or a peak of noise. So
noise is added only to the tokens with a peak and to the tokens whose logit suffices with noise of PEAK. The tokens are
those of the full computation. Their probabilities are estimates: the mass of the tail is estimated from a sample of its
tokens.

Many tree nodes share a position, and the forward on the device leaves the CPU idle. So MLX draws the random bits of a
position once, in a CPU stream, while the forward runs. Only the bits of tokens that can become candidates are turned
into noise. On a Linux processor the library draws all of it, which takes less time (`noise_row`).
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from draft_worker.candidates.head_columns import Columns
from draft_worker.candidates.ranking import MIN_CANDIDATES, mix
from draft_worker.engine_interface import Batch
from protocol.messages.sampling import Sampling
from protocol.sampling.threefry import gumbel, half_block, noise_bits, noise_key, noise_row
from protocol.speculation.token_tree import Candidates

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

    def __init__(self, at: Callable[[Ids | slice], Floats], high: npt.NDArray[np.bool_]) -> None:
        """`high`: where there is a peak."""
        self.at = at
        self._high = high

    @cached_property
    def all(self) -> Floats:
        return self.at(slice(None))

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
        self._vocabulary = vocabulary
        self._chosen = slice(width) if tokens is None else tokens
        self._limit = max(_MIN_POSITIONS, _CACHE_BYTES // (8 * vocabulary))
        self._drawn: OrderedDict[tuple[int, int], PositionNoise | tuple[mx.array, mx.array]] = OrderedDict()

    def begin(self, seed: int, positions: Iterable[int]) -> None:
        """Start to draw the noise of those positions that are not cached."""
        started = []
        for position in dict.fromkeys(positions):
            key = noise_key(seed, position)
            drawn = self._drawn.pop(key, None)
            if drawn is None:
                drawn = self._draw(key)
                started.append(drawn)
            self._drawn[key] = drawn
        mx.async_eval([drawn for drawn in started if isinstance(drawn, tuple)])
        while len(self._drawn) > self._limit:
            self._drawn.popitem(last=False)

    def position(self, seed: int, position: int) -> PositionNoise:
        """The noise for the token at absolute `position`."""
        self.begin(seed, (position,))
        key = noise_key(seed, position)
        drawn = self._drawn[key]
        if isinstance(drawn, tuple):
            bits, high = map(np.asarray, drawn)
            drawn = self._drawn[key] = PositionNoise(lambda columns: gumbel(bits[columns]), high)
        return drawn

    def _draw(self, key: tuple[int, int]) -> "PositionNoise | tuple[mx.array, mx.array]":
        """The noise, or the bits of its columns and where they are those of a peak, not yet computed."""
        row = noise_row(*key, self._vocabulary)
        if row is not None:
            values = row[self._chosen]
            return PositionNoise(values.__getitem__, values > PEAK)
        with mx.stream(_noise_stream()):
            bits = mx.random.split(mx.array(key, dtype=mx.uint32), half_block(self._vocabulary)).reshape(-1)
            bits = bits[self._chosen if isinstance(self._chosen, slice) else mx.array(self._chosen)]
            return bits, bits >= mx.array(int(_PEAK_BITS), mx.uint32)


@cache
def _noise_stream() -> mx.Stream:
    """One for all: MLX keeps the thread of each."""
    return mx.new_stream(mx.cpu)


GROUP_SIZE = 64
"""Tokens of a group. Only the maxima of groups are partitioned. Pad a long row of logits with -inf to whole groups."""
_FEW_GROUPS = 64
"""Up to so many groups are searched by themselves; of more, the whole row is."""
_FEW_COLUMNS = 9_000
"""Up to this length of a row every token has its score: a head of 8,192 tokens and those of a context."""
_STRIDE = 16
_FEW = 1024
"""Of so many tokens, which filters leave, noise is computed for each."""
_EXACT_TOKENS = 256
"""Without noise, the mass of at least this many tokens is exact."""
_LEAST = float(np.finfo(np.float32).min)
_SLACK = 1e-3
"""A margin on PEAK against rounding."""
_TAIL_MASS = 3.4372
"""E[exp(g); g <= PEAK] of Gumbel noise g: the exponential integral E1(exp(-4))."""


class Survivors(NamedTuple):
    """Tokens that may be among the best, and their scores."""

    tokens: Ids
    scores: Floats
    floor: float
    """Tokens below this logit and without a peak of noise are left out."""


def shortlist(logits: Floats, limit: int, temperature: float, noise: PositionNoise | None) -> Candidates:
    """The best `limit` tokens by score, the best first; of equals, lower ids first.

    `logits`: (V,) float32; a long row is a multiple of GROUP_SIZE. Tokens of -inf are never candidates. `noise`: None
    at temperature 0, where the score is the logit.
    """
    if len(logits) <= _FEW_COLUMNS:
        values = None if noise is None else noise.all
        scores = logits if values is None else logits[: len(values)] / np.float32(temperature) + values
        return _best(Survivors(np.arange(len(scores)), scores, -np.inf), limit, np.empty(0, np.float32))
    grouped = _Grouped.of(logits)
    if noise is None:
        floor = _kth(grouped.maxima, max(limit, _EXACT_TOKENS))
        tokens = grouped.at_least(floor)
        survivors = Survivors(tokens, logits[tokens], floor)
    else:
        survivors = _noisy(grouped, limit, temperature, noise)
    return _best(survivors, limit, _tail(logits, survivors.floor, temperature))


class _Grouped(NamedTuple):
    """A row of logits. Token t is of group t mod G."""

    logits: Floats
    maxima: Floats
    """(G,): of the groups."""

    @classmethod
    def of(cls, logits: Floats) -> "_Grouped":
        return cls(logits, logits.reshape(GROUP_SIZE, -1).max(axis=0))

    def at_least(self, floor: float) -> Ids:
        """Tokens, ascending, whose logit is at least `floor`; never of -inf."""
        groups = _at_least(self.maxima, floor)
        if len(groups) > _FEW_GROUPS:
            return _at_least(self.logits, floor)
        rows, columns = np.nonzero(self.logits.reshape(GROUP_SIZE, -1)[:, groups] >= max(floor, _LEAST))
        return rows * len(self.maxima) + groups[columns]


def _noisy(grouped: _Grouped, limit: int, temperature: float, noise: PositionNoise) -> Survivors:
    logits = grouped.logits
    # Tokens with high logits give a lower bound of the `limit`-th best score.
    first = grouped.at_least(_kth(grouped.maxima, limit))
    peak_scores = logits[noise.peaks] / temperature + noise.peak_values
    _, scores = _without_peaks(logits, temperature, noise, first)
    bound = _kth(np.concatenate([scores, peak_scores]), limit)
    floor = temperature * (bound - PEAK - _SLACK)
    tokens, scores = _without_peaks(logits, temperature, noise, grouped.at_least(floor))
    return Survivors(np.concatenate([tokens, noise.peaks]), np.concatenate([scores, peak_scores]), floor)


def _without_peaks(logits: Floats, temperature: float, noise: PositionNoise, tokens: Ids) -> tuple[Ids, Floats]:
    """The `tokens` without a peak, and their scores."""
    values = noise.at(tokens)
    flat = values <= PEAK
    return tokens[flat], logits[tokens[flat]] / temperature + values[flat]


def _at_least(values: Floats, floor: float) -> Ids:
    """Indices of the values that are at least `floor`; never of -inf."""
    return np.flatnonzero(values >= floor if floor > -np.inf else values > -np.inf)


def _kth(values: Floats, count: int) -> float:
    """The `count`-th largest value; -inf if there are fewer values."""
    return float(np.partition(values, -count)[-count]) if count <= len(values) else -np.inf


def _tail(logits: Floats, floor: float, temperature: float) -> npt.NDArray[np.float32]:
    """Numbers whose exponentials sum to about the mass of the tokens below `floor`."""
    sample = np.ascontiguousarray(logits[::_STRIDE])
    if temperature == 0:
        return sample[sample < floor] + np.float32(np.log(_STRIDE))
    return sample[sample < floor] / temperature + np.float32(np.log(_STRIDE * _TAIL_MASS))


def _best(survivors: Survivors, limit: int, tail: npt.NDArray[np.float32]) -> Candidates:
    tokens, scores = survivors.tokens, survivors.scores
    chosen = _at_least(scores, _kth(scores, limit))
    order = chosen[np.lexsort((tokens[chosen], -scores[chosen]))[:limit]]
    if not len(order):
        return Candidates([], [])
    top = scores[order[0]]
    total = np.exp(scores - top).sum() + np.exp(tail - top).sum()
    return Candidates(tokens[order].tolist(), np.minimum(np.exp(scores[order] - top) / total, 1.0).tolist())


class CandidateSelector:
    """Selects candidates among these columns, beside their target."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        few = columns.count <= _FEW_COLUMNS
        self._width = columns.count if few else -(-columns.count // GROUP_SIZE) * GROUP_SIZE

    def begin(self, sampling: Sampling, positions: Iterable[int]) -> None:
        """Start to draw the noise that `select` needs for tokens at these absolute positions."""
        if not sampling.greedy:
            self._prefetch.begin(sampling.seed, positions)

    def select_of(
        self, logits: mx.array, first: int, positions: Sequence[int], sampling: Sampling, batch: Batch
    ) -> list[Candidates]:
        """`select` for the rows from `first` on of (L, count or more) logits that the processor has computed."""
        numbers: Any = logits.astype(mx.float32)
        rows = np.asarray(numbers)[first:, : self.columns.count]
        padded = np.full((len(rows), self._width), -np.inf, np.float32)
        padded[:, : self.columns.count] = rows
        return self.select(padded, positions, sampling, batch)

    def select(
        self, logits: npt.NDArray[np.float32], positions: Sequence[int], sampling: Sampling, batch: Batch
    ) -> list[Candidates]:
        """Like `Columns.propose`, for (L, ...) logits, whose long rows are padded with -inf to whole groups. May
        overwrite the logits."""
        count = self.columns.count
        logits = logits[:, : self._width]
        if batch.followers:
            mix(logits, self.columns.followers(batch), sampling.temperature)
        if batch.processors is not None:
            logits[:, :count] = np.asarray(self.columns.processed(mx.array(logits[:, :count]), batch))
        logits[:, count:] = -np.inf
        rows = zip(logits, positions, strict=True)
        return [self._shortlist(row, position, sampling, batch.limit) for row, position in rows]

    def _shortlist(self, row: Floats, position: int, sampling: Sampling, limit: int) -> Candidates:
        limit = max(limit, MIN_CANDIDATES)
        if sampling.greedy:
            return self.columns.named(shortlist(row, limit, 0.0, None))
        possible = np.flatnonzero(row > -np.inf)
        if len(possible) > _FEW:
            noise = self._prefetch.position(sampling.seed, position)
            return self.columns.named(shortlist(row, limit, sampling.temperature, noise))
        bits = noise_bits(sampling.seed, position, self.columns.ids(possible), self.columns.vocabulary)
        scores = row[possible] / np.float32(sampling.temperature) + gumbel(bits)
        return self.columns.named(_best(Survivors(possible, scores, -np.inf), limit, np.empty(0, np.float32)))

    @cached_property
    def _prefetch(self) -> NoisePrefetch:
        return NoisePrefetch(self.columns.vocabulary, self.columns.shared, self.columns.tokens)
