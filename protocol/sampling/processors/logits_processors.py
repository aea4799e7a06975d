"""The ordered list of logits processors, those that drop no token (penalties, logit bias), and those of one sequence.

Knows no trees and no models.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import mlx.core as mx
import numpy as np

from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.sampling.grammar import GrammarError, Grammars
from protocol.sampling.processors.filters import FILTERS
from protocol.sampling.processors.processor import LogitsProcessor, Paths


class FrequencyPenalty(LogitsProcessor):
    """Frequency and presence penalty on the generated tokens, without the prompt."""

    fields = ("frequency_penalty", "presence_penalty")

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

    fields = ("logit_bias",)
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

    fields = ("repetition_penalty", "repetition_context")

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

    fields = ("grammar",)

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


PROCESSORS: tuple[type[LogitsProcessor], ...] = (FrequencyPenalty, GrammarMask, LogitBias, RepetitionPenalty, *FILTERS)
"""In the order of application. `Sampling` states this order to users."""
NOT_PROCESSED = {
    "temperature": "divides the processed logits, in `sampler.scores`",
    "seed": "chooses the noise, in `sampler.scores`",
    "logprobs": "reports the model's own logits, before any processor",
    "prompt_logprobs": "reports logits of the prompt, from which nothing is chosen",
    "verification": "chooses the acceptance rule",
}
"""Fields of `Sampling` that no processor handles, and why."""


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
