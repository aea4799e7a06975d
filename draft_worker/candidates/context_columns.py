"""Tokens of a context join a short head: what its text has, the target often writes again. Knows no network."""

from collections.abc import Iterable, Mapping, Sequence

import mlx.core as mx

from draft_worker.candidates.columns import Columns
from draft_worker.short_head import ShortHead

_MOST = 256
"""Tokens of a sequence that join; the latest ones stay."""


class ContextColumns:
    """The columns of one sequence: those of its draft's head, and behind them those of tokens that it has read and the
    head lacks."""

    def __init__(self, head: Columns, *, widens: bool) -> None:
        """`widens`: the head can compute any token's logits."""
        self.head = head
        self.now = head
        """The columns of the next forward."""
        self.tokens: Sequence[int] = ()
        """Those that the head lacks."""
        self._widens = widens

    def see(self, tokens: Sequence[int]) -> None:
        """The sequence reads these tokens."""
        if self._widens and (more := [each for each in self.head.lacking(tokens) if each not in self.tokens]):
            self.tokens = (*self.tokens, *more)[-_MOST:]
            self.now = self.head.beside(self.tokens)

    def own(self, logits: mx.array, more: Mapping[int, int]) -> mx.array:
        """The columns of this sequence, from those of a head that `widened` made wider by `more`."""
        width = logits.shape[-1] - len(more)
        if not more or (self.head.count == width and list(self.tokens) == list(more)):
            return logits
        known = logits[:, : self.head.count]
        if not self.tokens:
            return known
        return mx.concatenate([known, logits[:, mx.array([width + more[token] for token in self.tokens])]], axis=-1)


def widened(head: ShortHead | None, sequences: Iterable[ContextColumns]) -> Mapping[int, int]:
    """Let the next forward's head compute what all of `sequences` have read: each token with its place behind the
    head's own. None for a head that knows no other tokens."""
    if head is None or not head.widens:
        return {}
    more = dict.fromkeys(token for sequence in sequences for token in sequence.tokens)
    head.widen(list(more))
    return {token: place for place, token in enumerate(more)}
