"""Which arena holds the KV of which tokens, and which arenas have to go. Pure; opens none.

Names in, names out: whoever asks unlinks what is given up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.messages import KvOffer, KvReference, SequenceId

LEAST = 32
"""Tokens: a shorter prefix is evaluated in the time that its adoption takes."""


@dataclass(slots=True)
class _Arena:
    """One that was offered. `tokens` may grow; the first `count` of them are the ones it holds."""

    name: str
    tokens: Sequence[int]
    count: int
    size: int
    writer: SequenceId | None
    """The live sequence that it belongs to."""
    used: int = 0
    """When it was last offered or found, in uses of the library."""


class KvLibrary:
    """At most `limit` bytes of arenas; the ones that were not used for longest are given up first.

    A name that was given up is never referred to again.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._arenas: dict[str, _Arena] = {}
        self._uses = 0
        self._gone: dict[str, SequenceId] = {}
        """Names given up whose sequences are live: their writers may offer them once more."""

    @property
    def size(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.size for arena in self._arenas.values())

    def offer(self, offer: KvOffer, tokens: Sequence[int]) -> list[str]:
        """Take in what belongs to a live sequence, which consists of `tokens` (append-only); names to give up.

        A sequence has one arena, the one that holds more, and an arena never changes hands.
        """
        known = self._arenas.get(offer.name)
        if known is not None and known.writer != offer.sequence:
            return []
        count = min(offer.tokens, len(tokens))
        rival = next((arena for arena in self._of(offer.sequence) if arena.name != offer.name), None)
        if offer.name in self._gone:
            return [offer.name]
        if rival is not None and rival.count >= count:
            self._arenas.pop(offer.name, None)
            self._gone[offer.name] = offer.sequence
            return [offer.name]
        self._arenas[offer.name] = _Arena(offer.name, tokens, count, offer.size, offer.sequence)
        self._touch(offer.name)
        return [*([] if rival is None else self._give_up(rival)), *self._fit()]

    def find(self, tokens: Sequence[int]) -> KvReference | None:
        """The arena that shares the longest prefix with `tokens`, if it is worth adopting.

        The last token is never part of it: a start evaluates its root itself.
        """
        wanted = list(tokens[:-1])
        lengths = {name: _common_prefix(arena, wanted) for name, arena in self._arenas.items()}
        best = max(lengths, key=lambda name: (lengths[name], name), default=None)
        if best is None or lengths[best] < LEAST:
            return None
        self._touch(best)
        return KvReference(best, lengths[best])

    def end(self, sequence: SequenceId) -> None:
        """The sequence is over; what was saved of it may serve others."""
        self._gone = {name: writer for name, writer in self._gone.items() if writer != sequence}
        for arena in self._of(sequence):
            # The rest of the tokens is of no use, and their sequence grows no more.
            arena.tokens = list(arena.tokens[: arena.count])
            arena.writer = None

    def drop(self, name: str) -> list[str]:
        """Give up an arena that turned out to be unusable; names to give up."""
        arena = self._arenas.get(name)
        return [] if arena is None else self._give_up(arena)

    def holds(self, name: str) -> bool:
        return name in self._arenas

    def _of(self, sequence: SequenceId) -> list[_Arena]:
        return [arena for arena in self._arenas.values() if arena.writer == sequence]

    def _touch(self, name: str) -> None:
        self._uses += 1
        self._arenas[name].used = self._uses

    def _fit(self) -> list[str]:
        given_up: list[str] = []
        while self.size > self._limit:
            oldest = min(self._arenas.values(), key=lambda arena: arena.used)
            given_up += self._give_up(oldest)
        return given_up

    def _give_up(self, arena: _Arena) -> list[str]:
        del self._arenas[arena.name]
        if arena.writer is not None:
            self._gone[arena.name] = arena.writer
        return [arena.name]


def _common_prefix(arena: _Arena, wanted: list[int]) -> int:
    """By halves, since comparing lists is fast and counting equal tokens one by one is not."""
    if wanted[:LEAST] != list(arena.tokens[: min(LEAST, arena.count)]):
        return 0
    low, high = 0, min(arena.count, len(wanted))
    while low < high:
        middle = (low + high + 1) // 2
        if wanted[low:middle] == list(arena.tokens[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
