"""The processors that change logits before a token is sampled: filters, penalties, logit bias, grammars, in order.

The result for a node depends only on the request and the node's path, so target and draft agree on it. A path is given
as its tokens. Knows no trees and no models. A new processor is a class here, an entry of PROCESSORS or FILTERS, and its
fields in `SamplingFields`.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, ClassVar, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.sampling.grammar import GrammarError, Grammars
from protocol.sampling.thought import closing_token, free_position
from protocol.sampling.top_tokens import log_of_mass, log_total, on_host, top_values

_Row: TypeAlias = npt.NDArray[np.float32]
Paths: TypeAlias = Sequence[Sequence[int]]
"""For each row of logits, the tokens behind the root up to and with the row's node."""


class LogitsProcessor(ABC):
    """One change of the logits, for one sequence as of its root."""

    reads_paths: ClassVar[bool] = True
    """Whether what it does to a row depends on more than the row."""

    @classmethod
    @abstractmethod
    def wanted(cls, sampling: Sampling) -> bool:
        """Whether this processor can change the logits of such a request."""

    @abstractmethod
    def __init__(self, start: Start, grammars: Grammars) -> None:
        """`start`: the sampling and the tokens up to and with the root. May raise GrammarError."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Move the root behind `tokens`; the last of them is the new root."""
        return

    @abstractmethod
    def apply(self, logits: mx.array, paths: Paths) -> mx.array:
        """(L, V) float32 to (L, V) float32. Row i depends only on `logits[i]` and `paths[i]`. Dropped tokens become
        -inf. May raise GrammarError."""

    def begin(self, logits: mx.array, paths: Paths) -> mx.array:
        """As `apply`, without waiting for the device: a row for which that has to wait becomes NaN."""
        return self.apply(logits, paths)

    def forced(self, path: Sequence[int]) -> int | None:
        """The only token that may follow `path`; None if several may, or if this processor does not know. May raise
        GrammarError."""
        return None


class TopK(LogitsProcessor):
    """Keeps the k most probable tokens and all ties with the k-th. So the order of ids does not matter."""

    reads_paths = False

    @classmethod
    def wanted(cls, sampling: Sampling) -> bool:
        return sampling.top_k > 0 and not sampling.greedy

    def __init__(self, start: Start, grammars: Grammars) -> None:
        self._count = start.sampling.top_k

    def apply(self, logits: mx.array, paths: Paths) -> mx.array:
        if self._count >= logits.shape[-1]:
            return logits
        smallest_kept = top_values(logits, self._count)[:, -1:]
        return mx.where(logits < smallest_kept, -mx.inf, logits)


class TopPMinP(LogitsProcessor):
    """Top-p, then min-p, each with all ties with the least probable token that it keeps. The nucleus of top-p is the
    smallest set of most probable tokens that reaches a mass (Holtzman, Buys, Du, Forbes and Choi, "The Curious Case of
    Neural Text Degeneration", ICLR 2020, section 3.1).

    One processor for both: to normalise the log-probabilities again between them would change the last bits.
    """

    reads_paths = False

    @classmethod
    def wanted(cls, sampling: Sampling) -> bool:
        return (sampling.top_p < 1.0 or sampling.min_p > 0.0) and not sampling.greedy

    def __init__(self, start: Start, grammars: Grammars) -> None:
        self._top_p = start.sampling.top_p
        self._min_p = start.sampling.min_p

    def apply(self, logits: mx.array, paths: Paths) -> mx.array:
        if on_host():
            # Twelve operations of MLX over a vocabulary on one thread take several times as long.
            rows = np.array(logits, np.float32)
            for row in rows:
                self._cut(row)
            return mx.array(rows)
        logs = logits - log_total(logits)
        return self._kept(logits, logs, self._least(logs, least_of_nucleus))

    def _cut(self, row: _Row) -> None:
        """`_kept`, in place."""
        with np.errstate(invalid="ignore"):
            logs = row - log_of_mass(row)
        least = least_nearby(logs, self._top_p) if self._top_p < 1.0 else -math.inf
        if self._min_p > 0.0:
            least = max(least, logs.max() + math.log(self._min_p))
        np.putmask(row, logs < np.float32(least), -np.inf)

    def begin(self, logits: mx.array, paths: Paths) -> mx.array:
        logs = logits - log_total(logits)
        least = self._least(logs, least_of_shortlist)
        return mx.where(mx.isnan(least), mx.nan, self._kept(logits, logs, least))

    def _least(self, logs: mx.array, of_nucleus: Callable[[mx.array, float], mx.array]) -> mx.array:
        return of_nucleus(logs, self._top_p) if self._top_p < 1.0 else mx.array(-mx.inf)

    def _kept(self, logits: mx.array, logs: mx.array, least: mx.array) -> mx.array:
        if self._min_p > 0.0:
            least = mx.maximum(least, logs.max(axis=-1, keepdims=True) + math.log(self._min_p))
        return mx.where(logs < least, -mx.inf, logits)


FILTERS: tuple[type[LogitsProcessor], ...] = (TopK, TopPMinP)
"""In the order of application. At temperature 0 they are skipped: none drops the most probable token."""


_SHORTLIST = 256
"""Most nuclei have fewer tokens."""
_GROWTH = 16


def least_of_shortlist(logs: mx.array, mass: float) -> mx.array:
    """As `least_of_nucleus`, not yet computed, and NaN for a row whose nucleus may be larger than the shortlist."""
    best = top_values(logs, min(_SHORTLIST, logs.shape[-1]))
    outside = mx.cumsum(mx.exp(best), axis=-1) >= mass
    least = mx.take_along_axis(best, mx.argmax(outside, axis=-1, keepdims=True), axis=-1)
    beyond = -mx.inf if best.shape[-1] == logs.shape[-1] else mx.nan
    return mx.where(outside.any(axis=-1, keepdims=True), least, beyond)


def least_of_nucleus(logs: mx.array, mass: float) -> mx.array:
    """(L, 1) float32: the least log-probability in each row's nucleus, the lowest one with less than `mass` above it.

    `logs`: (L, V) float32 log-probabilities. Masses are summed from the most probable token down, those of a shortlist
    in float32, so that the device need not be waited for, and in float64 where it does not suffice. A row's result does
    not depend on the other rows. -inf for a row of NaN.
    """
    least = np.array(least_of_shortlist(logs, mass), np.float32)
    for row in np.flatnonzero(np.isnan(least)):
        least[row] = _searched(np.asarray(logs[int(row)], np.float32), mass)
    return mx.array(least)


_NEAR = 5.0, 10.0
"""Nats below the most probable token, within which most nuclei lie."""


def least_nearby(logs: _Row, mass: float) -> float:
    """`least_of_nucleus` of a (V,) row, by the tokens that are nearly as probable as the best one, in float64."""
    for near in _NEAR:
        falling = -np.sort(-logs[logs >= logs.max() - near])
        outside = np.flatnonzero(np.cumsum(np.exp(falling.astype(np.float64))) >= mass)
        if len(outside):
            return float(falling[outside[0]])
    return _searched(logs, mass, max(1, min(_SHORTLIST, len(logs) - 1)))


def _searched(row: _Row, mass: float, count: int = _SHORTLIST) -> float:
    """The same, by shortlists longer than `count`."""
    rising = -row
    while count < len(rising):
        count = min(_GROWTH * count, len(rising))
        best = -np.sort(np.partition(rising, count - 1)[:count])
        outside = np.flatnonzero(np.cumsum(np.exp(best.astype(np.float64)))[:-1] >= mass)
        if len(outside):
            return float(best[outside[0]])
    return -np.inf


class FrequencyPenalty(LogitsProcessor):
    """Frequency and presence penalty on the generated tokens, without the prompt."""

    @classmethod
    def wanted(cls, sampling: Sampling) -> bool:
        return bool(sampling.frequency_penalty or sampling.presence_penalty)

    def __init__(self, start: Start, grammars: Grammars) -> None:
        self._frequency = start.sampling.frequency_penalty
        self._presence = start.sampling.presence_penalty
        self._counts = Counter(start.tokens[start.prompt_tokens :])

    def advance(self, tokens: Sequence[int]) -> None:
        self._counts.update(tokens)

    def apply(self, logits: mx.array, paths: Paths) -> mx.array:
        """Subtract each penalty once. With two subtractions (root, path), the rounding would depend on the root."""
        vocabulary = logits.shape[-1]
        at_root = np.zeros(vocabulary, dtype=np.float32)
        for token, count in self._counts.items():
            if token < vocabulary:
                at_root[token] = self._penalty(count)
        penalised = logits - mx.array(at_root)
        rows, tokens, penalties = list[int](), list[int](), list[float]()
        for row, path in enumerate(paths):
            for token, count in Counter(path).items():
                if token < vocabulary:
                    rows.append(row)
                    tokens.append(token)
                    penalties.append(self._penalty(self._counts[token] + count))
        if rows:
            where = mx.array(rows), mx.array(tokens)
            penalised[where] = logits[where] - mx.array(penalties, dtype=mx.float32)
        return penalised

    def _penalty(self, count: int) -> float:
        """OpenAI's API reference, "Frequency and presence penalties"."""
        return count * self._frequency + (count > 0) * self._presence


class LogitBias(LogitsProcessor):
    """Adds a number to the logit of each listed token. Ignores tokens beyond the vocabulary."""

    reads_paths = False

    @classmethod
    def wanted(cls, sampling: Sampling) -> bool:
        return bool(sampling.logit_bias)

    def __init__(self, start: Start, grammars: Grammars) -> None:
        self._biases = dict(start.sampling.logit_bias)

    def apply(self, logits: mx.array, paths: Paths) -> mx.array:
        biases = {token: bias for token, bias in self._biases.items() if token < logits.shape[-1]}
        if not biases:
            return logits
        return _sum(logits.at[:, mx.array(list(biases))], mx.array(list(biases.values()), dtype=mx.float32))


def _sum(places: Any, numbers: mx.array) -> mx.array:
    return places.add(numbers)


class RepetitionPenalty(LogitsProcessor):
    """Keskar et al. 2019 (CTRL), section 4.1, made sign-aware: a repeated token never gains.

    A token is repeated if it is among the last `repetition_context` tokens of the path, the prompt included.
    """

    @classmethod
    def wanted(cls, sampling: Sampling) -> bool:
        return sampling.repetition_penalty != 1.0 and sampling.repetition_context > 0

    def __init__(self, start: Start, grammars: Grammars) -> None:
        self._penalty = start.sampling.repetition_penalty
        self._context = start.sampling.repetition_context
        self._recent = start.tokens[-self._context :]

    def advance(self, tokens: Sequence[int]) -> None:
        self._recent = (*self._recent, *tokens)[-self._context :]

    def apply(self, logits: mx.array, paths: Paths) -> mx.array:
        repeated = np.zeros(logits.shape, dtype=bool)
        for row, path in enumerate(paths):
            recent = np.array((*self._recent, *path)[-self._context :], dtype=np.int64)
            repeated[row, recent[recent < logits.shape[-1]]] = True
        penalised = mx.where(logits < 0, logits * self._penalty, logits / self._penalty)
        return mx.where(mx.array(repeated), penalised, logits)


class GrammarMask(LogitsProcessor):
    """A row keeps all tokens if the grammar does not allow its path: no accepted path leads to the row."""

    @classmethod
    def wanted(cls, sampling: Sampling) -> bool:
        return sampling.grammar is not None

    def __init__(self, start: Start, grammars: Grammars) -> None:
        """Raises GrammarError."""
        assert start.sampling.grammar is not None
        self._state = grammars.open(start.sampling.grammar, start.eos_tokens, start.tokens[start.prompt_tokens :])

    def advance(self, tokens: Sequence[int]) -> None:
        self._state.advance(tokens)

    def apply(self, logits: mx.array, paths: Paths) -> mx.array:
        """Raises GrammarError."""
        allowed = np.ones((len(paths), self._state.vocabulary), dtype=bool)
        for row, mask in enumerate(self._state.allowed(paths)):
            if mask is not None:
                allowed[row] = mask
        return mx.where(mx.array(allowed)[:, : logits.shape[-1]], logits, -mx.inf)

    def forced(self, path: Sequence[int]) -> int | None:
        """Raises GrammarError."""
        (mask,) = self._state.allowed([path])
        return None if mask is None or np.count_nonzero(mask) != 1 else int(mask.argmax())


class ThoughtEnd(LogitsProcessor):
    """Gives the probability of end tokens to the mark that ends the thought, while one is open."""

    @classmethod
    def wanted(cls, sampling: Sampling) -> bool:
        return sampling.closed_thought is not None

    def __init__(self, start: Start, grammars: Grammars) -> None:
        assert start.sampling.closed_thought is not None
        self._thought = start.sampling.closed_thought
        self._temperature = start.sampling.temperature
        self._ends = start.eos_tokens
        self._position = free_position(self._thought, start.tokens[start.prompt_tokens :])

    def advance(self, tokens: Sequence[int]) -> None:
        self._position = free_position(self._thought, tokens, self._position)

    def apply(self, logits: mx.array, paths: Paths) -> mx.array:
        behind = (closing_token(self._thought, free_position(self._thought, path, self._position)) for path in paths)
        marks = {row: mark for row, mark in enumerate(behind) if mark is not None}
        ends = [end for end in self._ends if end < logits.shape[-1]]
        if not marks or not ends:
            return logits
        rows, columns = mx.array(list(marks))[:, None], mx.array([[mark, *ends] for mark in marks.values()])
        found, heat = logits[rows, columns], self._temperature
        moved = heat * log_total(found / heat) if heat else found.max(axis=-1, keepdims=True)
        closed = mx.array(logits)
        closed[rows, columns] = -mx.inf
        closed[rows, columns[:, :1]] = moved
        return closed


PROCESSORS: tuple[type[LogitsProcessor], ...] = (
    *(FrequencyPenalty, LogitBias, ThoughtEnd, GrammarMask, RepetitionPenalty),
    *FILTERS,
)
"""In the order of application. `Sampling` states this order to users."""


class LogitsProcessors:
    """The processors of one sequence, as of its root."""

    def __init__(self, processors: Sequence[LogitsProcessor], *, lenient: bool = False) -> None:
        """`lenient`: a processor that raises GrammarError is skipped. For a draft, whose guesses may then be worse."""
        self._processors = processors
        self._skipped = _skipped(lenient)

    @classmethod
    def wanted(cls, start: Start, grammars: Grammars, *, lenient: bool = False) -> "LogitsProcessors | None":
        """The processors of a sequence that begins at `start`; None if it needs none. Raises GrammarError unless
        `lenient`."""
        processors: list[LogitsProcessor] = []
        for processor in PROCESSORS:
            if processor.wanted(start.sampling):
                with _skipped(lenient):
                    processors.append(processor(start, grammars))
        return cls(processors, lenient=lenient) if processors else None

    def advance(self, tokens: Sequence[int]) -> None:
        """Move the root behind `tokens`; the last of them is the new root."""
        for processor in self._processors:
            processor.advance(tokens)

    @property
    def reads_paths(self) -> bool:
        """Whether what they do to a row depends on more than the row."""
        return any(processor.reads_paths for processor in self._processors)

    @property
    def reads_tokens(self) -> bool:
        """Whether what they do to a number of a row depends on the token that it stands for."""
        return not all(isinstance(processor, FILTERS) for processor in self._processors)

    def apply(self, logits: mx.array, paths: Paths) -> mx.array:
        """(L, V) float32 of (L, V) `logits` of any float type. Raises GrammarError unless lenient."""
        logits = logits.astype(mx.float32)
        for processor in self._processors:
            with self._skipped:
                logits = processor.apply(logits, paths)
        return logits

    def begin(self, logits: mx.array, paths: Paths) -> mx.array:
        """As `apply`, without waiting for the device: a row for which that has to wait becomes NaN."""
        logits = logits.astype(mx.float32)
        for processor in self._processors:
            with self._skipped:
                logits = processor.begin(logits, paths)
        return logits

    def forced(self, path: Sequence[int]) -> int | None:
        """The only token that may follow `path`, for all logits; None if several may. Raises GrammarError unless
        lenient."""
        for processor in self._processors:
            with self._skipped:
                token = processor.forced(path)
                if token is not None:
                    return token
        return None


def _skipped(lenient: bool) -> AbstractContextManager[bool | None]:
    return suppress(GrammarError) if lenient else nullcontext()
