"""Which arena holds the KV of which tokens, and which arenas are to be unlinked. Pure; opens no shared memory.

Names in, names out: the caller unlinks the arenas whose names are returned.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.kv.prefix_index import MIN_SHARED_TOKENS, PrefixIndex
from protocol.messages.base import SequenceId
from protocol.messages.worker import KvOffer, KvReference

_REMEMBERED_NAMES = 1024
"""Names of unlinked arenas that are remembered: an offer of one of them may still be on its way."""


@dataclass(slots=True)
class _Arena:
    """An offered arena, which holds the KV of the first `count` tokens of its sequence."""

    name: str
    count: int
    size: int
    writer: SequenceId | None
    """The live sequence that it belongs to."""
    used: int = 0
    """The index's count of uses when this arena was last offered or found."""


class ArenaIndex:
    """At most `limit` bytes of arenas, beyond those that are being adopted.

    An arena goes as soon as another one holds all of it, unless a live sequence writes it: of a conversation, the last
    turn's arena stays. Then the least recently used ones go. A name that was returned is never referred to again.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._arenas: dict[str, _Arena] = {}
        self._index: PrefixIndex[str] = PrefixIndex()
        self._uses = 0
        self._removed_names: OrderedDict[str, None] = OrderedDict()
        self._lent: dict[SequenceId, str] = {}
        """The arena that each starting sequence is to adopt, until the target has answered."""

    @property
    def size(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.size for arena in self._arenas.values())

    @property
    def indexed(self) -> int:
        """Tokens that the index holds."""
        return self._index.stored

    def offer(self, offer: KvOffer, tokens: Sequence[int]) -> list[str]:
        """Take in an arena of a live sequence, which consists of `tokens` (append-only). Returns names to unlink.

        A sequence has one arena, the one that holds more tokens. An arena whose sequence has ended passes to a sequence
        that begins with all its tokens: the target goes on where the earlier turn of a conversation stopped.
        """
        if offer.name in self._removed_names:
            return [offer.name]
        known = self._arenas.get(offer.name)
        if known is not None and not self._continues(known, tokens, offer.sequence):
            return []
        count = min(offer.tokens, len(tokens))
        others = [arena for arena in self._of(offer.sequence) if arena.name != offer.name]
        if any(other.count >= count for other in others):
            return self._remove(offer.name)
        self._hold(offer, tokens, max(count, known.count if known else 0))
        return [*(name for other in others for name in self._remove(other.name)), *self._evict()]

    def find(self, tokens: Sequence[int]) -> KvReference | None:
        """The arena that shares the longest prefix with `tokens`, if it is worth adopting.

        Of several, the most recently used one, so that the others can be evicted. The last token is never part of the
        prefix: a Start evaluates its root itself.
        """
        shared = self._index.longest(tokens[:-1])
        if shared.tokens < MIN_SHARED_TOKENS:
            return None
        best = max(shared.names, key=lambda name: self._arenas[name].used)
        self._touch(best)
        return KvReference(best, shared.tokens)

    def lend(self, sequence: SequenceId, reference: KvReference | None) -> None:
        """The Start of this sequence names that arena: keep it until the target has answered."""
        self._lent.pop(sequence, None)
        if reference is not None:
            self._lent[sequence] = reference.name

    def returned(self, sequence: SequenceId) -> list[str]:
        """The target has answered the Start of this sequence. Returns names to unlink."""
        self._lent.pop(sequence, None)
        return self._evict()

    def sequence_ended(self, sequence: SequenceId) -> list[str]:
        """What was saved of the sequence may serve others. Returns names to unlink."""
        for arena in self._of(sequence):
            arena.writer = None
        return self.returned(sequence)

    def __contains__(self, name: str) -> bool:
        return name in self._arenas

    def drop(self, name: str) -> list[str]:
        """Forget an arena that turned out to be unusable. Returns names to unlink."""
        return self._remove(name) if name in self._arenas else []

    def _continues(self, known: _Arena, tokens: Sequence[int], writer: SequenceId) -> bool:
        """Whether a sequence may go on writing an arena; never one that another live sequence writes."""
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

    def _evict(self) -> list[str]:
        """Evict what another arena holds as well, and then the least recently used ones beyond the limit."""
        removed: list[str] = []
        lent = set(self._lent.values())
        by_age = sorted((arena for arena in self._arenas.values() if arena.name not in lent), key=lambda one: one.used)
        for arena in by_age:
            if arena.writer is None and self._index.covered(arena.name):
                removed += self._remove(arena.name)
        excess = self.size - self._limit
        for arena in by_age:
            if excess > 0 and arena.name in self._arenas:
                excess -= arena.size
                removed += self._remove(arena.name)
        return removed

    def _remove(self, name: str) -> list[str]:
        if self._arenas.pop(name, None) is not None:
            self._index.remove(name)
        self._removed_names[name] = None
        if len(self._removed_names) > _REMEMBERED_NAMES:
            self._removed_names.popitem(last=False)
        return [name]
