"""Processors that raise or lower logits and drop no token: penalties and the logit bias."""

from collections import Counter
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.sampling.grammar import Grammars
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
        rows, tokens, penalties = [], [], []
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

    @classmethod
    def wanted(cls, sampling: Sampling) -> bool:
        return bool(sampling.logit_bias)

    def __init__(self, start: Start, grammars: Grammars) -> None:
        self._biases = dict(start.sampling.logit_bias)

    def apply(self, logits: mx.array, paths: Paths) -> mx.array:
        biases = {token: bias for token, bias in self._biases.items() if token < logits.shape[-1]}
        if not biases:
            return logits
        return logits.at[:, mx.array(list(biases))].add(mx.array(list(biases.values()), dtype=mx.float32))


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
