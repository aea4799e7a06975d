"""What a sequence's own past does to its next token: penalties on what was generated, and a grammar.

Works on logits before any rule of sampling sees them, so that all rules and the draft obey. What it does to a row is
a function of the tokens generated before that row alone. Knows no trees: a row's path is given as its tokens.
"""

from collections import Counter
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.sampling.grammar import Grammars, GrammarState


class LogitsProcessors:
    """Of one sequence, as of its root. Without penalties and grammar it changes nothing."""

    def __init__(self, sampling: Sampling, grammar: GrammarState | None, generated: Sequence[int]) -> None:
        """`grammar` stands behind `generated`."""
        self._frequency = sampling.frequency_penalty
        self._presence = sampling.presence_penalty
        self._penalises = bool(self._frequency or self._presence)
        self._counts = Counter(generated)
        self._grammar = grammar

    @classmethod
    def at(cls, start: Start, grammars: Grammars) -> "LogitsProcessors":
        """Of a sequence that is served from `start` on. Raises GrammarError."""
        wanted, generated = start.sampling.grammar, start.tokens[start.prompt_tokens :]
        state = None if wanted is None else grammars.open(wanted, start.eos_tokens, generated)
        return cls(start.sampling, state, generated)

    @property
    def active(self) -> bool:
        return self._penalises or self._grammar is not None

    def forced(self, path: Sequence[int]) -> int | None:
        """The one token that may follow `path`, if there is only one: whatever the model thinks, it is chosen.
        Raises GrammarError."""
        if self._grammar is None:
            return None
        (mask,) = self._grammar.allowed([path])
        return None if mask is None or np.count_nonzero(mask) != 1 else int(mask.argmax())

    def advance(self, tokens: Sequence[int]) -> None:
        """These follow the root; the last of them is the new one."""
        self._counts.update(tokens)
        if self._grammar is not None:
            self._grammar.advance(tokens)

    def applied(self, logits: mx.array, paths: Sequence[Sequence[int]]) -> mx.array:
        """(L, V) float32; `paths[i]` are the tokens between the root and what row i is to choose.

        Forbidden tokens get -inf. A row whose own path is forbidden keeps all, since nobody comes to it.
        Raises GrammarError.
        """
        if not self.active:
            return logits
        logits = logits.astype(mx.float32)
        if self._penalises:
            logits = self._penalised(logits, paths)
        return logits if self._grammar is None else _masked(logits, self._grammar, paths)

    def _penalised(self, logits: mx.array, paths: Sequence[Sequence[int]]) -> mx.array:
        """Every row first as at the root, then anew where its own path holds a token: never two subtractions, whose
        rounding would depend on where the root is."""
        vocabulary = logits.shape[-1]
        base = np.zeros(vocabulary, dtype=np.float32)
        for token, count in self._counts.items():
            if token < vocabulary:
                base[token] = self._penalty(count)
        penalised = logits - mx.array(base)
        rows, tokens, values = [], [], []
        for row, path in enumerate(paths):
            for token, count in Counter(path).items():
                if token < vocabulary:
                    rows.append(row)
                    tokens.append(token)
                    values.append(self._penalty(self._counts[token] + count))
        if rows:
            where = mx.array(rows), mx.array(tokens)
            penalised[where] = logits[where] - mx.array(values, dtype=mx.float32)
        return penalised

    def _penalty(self, count: int) -> float:
        """OpenAI's API reference, "Frequency and presence penalties"."""
        return count * self._frequency + (count > 0) * self._presence


def _masked(logits: mx.array, grammar: GrammarState, paths: Sequence[Sequence[int]]) -> mx.array:
    allowed = np.ones((len(paths), grammar.vocabulary), dtype=bool)
    for row, mask in enumerate(grammar.allowed(paths)):
        if mask is not None:
            allowed[row] = mask
    return mx.where(mx.array(allowed)[:, : logits.shape[-1]], logits, -mx.inf)
