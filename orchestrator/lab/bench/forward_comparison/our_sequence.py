"""A sequence in our caches that can return to its context."""

from collections.abc import Sequence

import mlx.core as mx

from protocol.inference.language_model import LanguageModel
from protocol.inference.slots import PREFIX


class OurSequence:
    """Forwards behind one context."""

    def __init__(self, model: LanguageModel, context: Sequence[int]) -> None:
        self._sequence = model.sequence()
        self._sequence.prefill(context)
        self._context = len(context)
        self._first = 0
        """Number of the first row of the last forward."""

    def chain(self, tokens: Sequence[int]) -> mx.array:
        """(L, V) logits, not yet computed."""
        return self._evaluated(tokens, range(-1, len(tokens) - 1))

    def tree(self, tokens: Sequence[int]) -> mx.array:
        """(L, V) logits, not yet computed, of a balanced binary tree."""
        return self._evaluated(tokens, [(row - 1) // 2 for row in range(len(tokens))])

    def keep(self, rows: int) -> None:
        """Commit the first of the last chain's rows, drop the others; computed on return."""
        self._sequence.keep(range(self._first, self._first + rows), ())
        mx.eval([cache.arrays for cache in self._sequence.caches])

    def undo(self) -> None:
        """Return to the context."""
        self._sequence.truncate(self._context)

    def _evaluated(self, tokens: Sequence[int], parents: Sequence[int]) -> mx.array:
        """A parent is an index among the tokens, or -1."""
        self._first = self._sequence.next_row
        return self._sequence.evaluate(tokens, [self._first + row if row >= 0 else PREFIX for row in parents])
