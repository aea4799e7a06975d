"""Which tokens of a conversation a draft sees whose context is shorter than the conversation. Pure.

The draft keeps the first tokens, the attention sinks, and the last ones (StreamingLLM, arXiv 2309.17453, section 3.2).
They take the positions 0, 1, ... of the draft's model. When the context is full, a part of the tokens behind the sinks
is dropped at once and the rest is prefilled again, because cached keys are rotated for their old positions.
"""

from collections.abc import Sequence
from typing import NamedTuple

from protocol.messages.base import Token

_SINKS = 4
"""Four are enough for models that give their first tokens much of their attention (arXiv 2309.17453)."""
_MOST_TREE = 256
"""More slots for a tree help no draft."""


class RollingContext(NamedTuple):
    """The rule for a draft whose model has `context` positions. It depends on the number of tokens alone.

    So a new turn, a restarted draft and another request with the same beginning see the same tokens.
    """

    context: int

    def skipped(self, length: int) -> int:
        """Tokens behind the sinks that the draft does not see of `length` tokens before the root."""
        excess = length - self._most
        return 0 if excess <= 0 else -(-excess // self._stride) * self._stride

    def seen(self, tokens: Sequence[Token]) -> list[Token]:
        """What the draft sees of the tokens before the root. Leaves positions for a tree."""
        skipped = self.skipped(len(tokens))
        return list(tokens) if not skipped else [*tokens[: self.sinks], *tokens[self.sinks + skipped :]]

    def run(self, index: int, length: int) -> tuple[int, int]:
        """Of the tokens that the draft sees of `length` tokens: the position in the conversation of the one at `index`,
        and how many of them follow one another there, from it on."""
        skipped = self.skipped(length)
        if skipped and index < self.sinks:
            return index, self.sinks - index
        return index + skipped, length - skipped - index

    def horizon(self, length: int) -> int:
        """The first position of the conversation that is never evaluated, with `length` tokens before the root."""
        # The token predicted at the model's last position would be beyond its context.
        return self.context - 1 + self.skipped(length)

    @property
    def sinks(self) -> int:
        """The first tokens, which the draft always sees."""
        return min(_SINKS, self.context // 8)

    @property
    def _most(self) -> int:
        """Most tokens before the root. The rest of the context is for the tree."""
        return max(0, self.context - max(2, min(_MOST_TREE, self.context // 8)))

    @property
    def _stride(self) -> int:
        """Tokens that are dropped at once. A smaller part keeps more tokens and prefills more often."""
        return max(1, self.context * 3 // 8)
