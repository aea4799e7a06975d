"""The processor that drops the tokens that the request's grammar does not allow."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.sampling.grammar import Grammars
from protocol.sampling.processors.processor import LogitsProcessor, Paths


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
