"""Which arena holds the KV of which tokens, and which arenas have to go. Pure; opens none.

Names in, names out: whoever asks unlinks what is given up.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.kv.prefix_index import MIN_SHARED_TOKENS, PrefixIndex
from protocol.messages.base import SequenceId
from protocol.messages.worker import KvOffer, KvReference

_REMEMBERED = 1024
"""Names given up: an offer of one of them may still be on its way."""


@dataclass(slots=True)
class _Arena:
    """One that was offered, with the first `count` tokens of its sequence."""

    name: str
    count: int
    size: int
    writer: SequenceId | None
    """The live sequence that it belongs to."""
    used: int = 0
    """When it was last offered or found, in uses of the library."""


class ArenaIndex:
    """At most `limit` bytes of arenas, beyond those that are being adopted.

    An arena goes as soon as another one holds all of it, unless a live sequence writes it: of a conversation the last
    turn's stays. Then the ones that were not used for longest go. A name that was given up is never referred to again.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._arenas: dict[str, _Arena] = {}
        self._index: PrefixIndex[str] = PrefixIndex()
        self._uses = 0
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._lent: dict[SequenceId, str] = {}
        """What a starting sequence was told to adopt, until the target has."""

    @property
    def size(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.size for arena in self._arenas.values())

    @property
    def indexed(self) -> int:
        """Tokens that the index holds."""
        return self._index.stored

    def offer(self, offer: KvOffer, tokens: Sequence[int]) -> list[str]:
        """Take in what belongs to a live sequence, which consists of `tokens` (append-only); names to give up.

        A sequence has one arena, the one that holds more. One whose sequence is over passes to another that begins
        with all it holds: the target goes on where the earlier turn of a conversation stopped.
        """
        if offer.name in self._gone:
            return [offer.name]
        known = self._arenas.get(offer.name)
        if known is not None and not self._continues(known, tokens, offer.sequence):
            return []
        count = min(offer.tokens, len(tokens))
        rivals = [arena for arena in self._of(offer.sequence) if arena.name != offer.name]
        if any(rival.count >= count for rival in rivals):
            return self._give_up(offer.name)
        self._hold(offer, tokens, max(count, known.count if known else 0))
        return [*(name for rival in rivals for name in self._give_up(rival.name)), *self._settle()]

    def find(self, tokens: Sequence[int]) -> KvReference | None:
        """The arena that shares the longest prefix with `tokens`, if it is worth adopting; of several the one that
        was used last, so that the others may grow old.

        The last token is never part of it: a start evaluates its root itself.
        """
        shared = self._index.longest(tokens[:-1])
        if shared.tokens < MIN_SHARED_TOKENS:
            return None
        best = max(shared.names, key=lambda name: self._arenas[name].used)
        self._touch(best)
        return KvReference(best, shared.tokens)

    def lend(self, sequence: SequenceId, reference: KvReference | None) -> None:
        """This sequence is told to adopt that: it stays until the sequence has."""
        self._lent.pop(sequence, None)
        if reference is not None:
            self._lent[sequence] = reference.name

    def returned(self, sequence: SequenceId) -> list[str]:
        """The sequence needs nothing lent any more; names to give up."""
        self._lent.pop(sequence, None)
        return self._settle()

    def end(self, sequence: SequenceId) -> list[str]:
        """The sequence is over; what was saved of it may serve others. Names to give up."""
        for arena in self._of(sequence):
            arena.writer = None
        return self.returned(sequence)

    def holds(self, name: str) -> bool:
        return name in self._arenas

    def drop(self, name: str) -> list[str]:
        """Give up an arena that turned out to be unusable; names to give up."""
        return self._give_up(name) if name in self._arenas else []

    def _continues(self, known: _Arena, tokens: Sequence[int], writer: SequenceId) -> bool:
        """Whether a sequence may go on with an arena; one that another live sequence writes is no business of its."""
        if known.writer is not None:
            return known.writer == writer
        return self._index.begins(known.name, tokens)

    def _hold(self, offer: KvOffer, tokens: Sequence[int], count: int) -> None:
        known = self._arenas.get(offer.name)
        self._index.extend(offer.name, tokens[known.count if known else 0 : count])
        self._arenas[offer.name] = _Arena(offer.name, count, offer.size, offer.sequence)
        self._touch(offer.name)

    def _of(self, sequence: SequenceId) -> list[_Arena]:
        return [arena for arena in self._arenas.values() if arena.writer == sequence]

    def _touch(self, name: str) -> None:
        self._uses += 1
        self._arenas[name].used = self._uses

    def _settle(self) -> list[str]:
        """Give up what another one holds as well, and then what there is no room for."""
        given_up: list[str] = []
        lent = set(self._lent.values())
        by_age = sorted((arena for arena in self._arenas.values() if arena.name not in lent), key=lambda one: one.used)
        for arena in by_age:
            if arena.writer is None and self._index.covered(arena.name):
                given_up += self._give_up(arena.name)
        excess = self.size - self._limit
        for arena in by_age:
            if excess > 0 and arena.name in self._arenas:
                excess -= arena.size
                given_up += self._give_up(arena.name)
        return given_up

    def _give_up(self, name: str) -> list[str]:
        if self._arenas.pop(name, None) is not None:
            self._index.remove(name)
        self._gone[name] = None
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
        return [name]
