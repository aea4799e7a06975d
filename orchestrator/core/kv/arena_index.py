"""Which arena holds the KV of which tokens, and which arenas are to be unlinked. Pure; opens no shared memory.

Names in, names out: the caller unlinks the arenas whose names are returned.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.kv.prefix_index import MIN_SHARED_TOKENS, PrefixIndex
from protocol.messages.base import SequenceId
from protocol.messages.kv import KvOffer, KvReference

_REMEMBERED_NAMES = 1024
"""Names of unlinked arenas that are remembered, since an offer of one of them may still be on its way."""


@dataclass(slots=True)
class _Arena:
    """An offered arena, which holds the KV of the first `count` tokens of its sequence."""

    name: str
    count: int
    size: int
    writer: SequenceId | None
    """The live sequence whose KV it holds; None once that sequence has ended."""
    last_use: int = 0
    """The index's count of uses when this arena was last offered or found."""


class ArenaIndex:
    """At most `limit` bytes of arenas; those that are being adopted are never evicted.

    An arena is evicted as soon as another one holds all of its tokens, unless a live sequence writes it: of a
    conversation, the last turn's arena stays. Beyond the limit the least recently used arenas are evicted. A name that
    was returned for unlinking is never referred to again.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._arenas: dict[str, _Arena] = {}
        self._index: PrefixIndex[str] = PrefixIndex()
        self._uses = 0
        self._removed_names: OrderedDict[str, None] = OrderedDict()
        self._pinned: dict[SequenceId, str] = {}
        """By starting sequence: the arena that the target was told to adopt and has not answered for."""

    @property
    def size(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.size for arena in self._arenas.values())

    @property
    def indexed(self) -> int:
        """Tokens that the index stores."""
        return self._index.stored

    def offer(self, offer: KvOffer, tokens: Sequence[int]) -> list[str]:
        """Add an arena of a live sequence, whose committed tokens are `tokens`. Returns names to unlink.

        A sequence has one arena, the one that holds more tokens. A sequence that begins with all tokens of an ended
        sequence's arena takes that arena over: the target continues an earlier turn of the conversation.
        """
        if offer.name in self._removed_names:
            return [offer.name]
        earlier = self._arenas.get(offer.name)
        if earlier is not None and not self._continues(earlier, tokens, offer.sequence):
            return []
        count = min(offer.tokens, len(tokens))
        others = [arena for arena in self._of(offer.sequence) if arena.name != offer.name]
        if any(other.count >= count for other in others):
            return self._remove(offer.name)
        self._store(offer, tokens, max(count, earlier.count if earlier else 0))
        return [*(name for other in others for name in self._remove(other.name)), *self._evict()]

    def find(self, tokens: Sequence[int]) -> KvReference | None:
        """The arena that shares the longest prefix with `tokens`, if it is worth adopting.

        Of several, the most recently used one, so that the others can be evicted. The last token is never part of the
        prefix: a Start evaluates its root itself.
        """
        shared = self._index.longest(tokens[:-1])
        if shared.tokens < MIN_SHARED_TOKENS:
            return None
        best = max(shared.names, key=lambda name: self._arenas[name].last_use)
        self._touch(best)
        return KvReference(best, shared.tokens)

    def pin(self, sequence: SequenceId, reference: KvReference | None) -> None:
        """The Start of this sequence names that arena: keep it until the target has answered."""
        self._pinned.pop(sequence, None)
        if reference is not None:
            self._pinned[sequence] = reference.name

    def unpin(self, sequence: SequenceId) -> list[str]:
        """The target has answered the Start of this sequence. Returns names to unlink."""
        self._pinned.pop(sequence, None)
        return self._evict()

    def being_adopted(self) -> set[str]:
        """Names of the arenas in Starts that the target has not answered."""
        return set(self._pinned.values())

    def sequence_ended(self, sequence: SequenceId) -> list[str]:
        """Other sequences may take over the sequence's arena. Returns names to unlink."""
        for arena in self._of(sequence):
            arena.writer = None
        return self.unpin(sequence)

    def __contains__(self, name: str) -> bool:
        return name in self._arenas

    def drop(self, name: str) -> list[str]:
        """Remove an arena that the target could not adopt. Returns names to unlink."""
        return self._remove(name) if name in self._arenas else []

    def _continues(self, arena: _Arena, tokens: Sequence[int], writer: SequenceId) -> bool:
        """Whether a sequence may continue an arena; never one that another live sequence writes."""
        if arena.writer is not None:
            return arena.writer == writer
        return self._index.begins(arena.name, tokens)

    def _store(self, offer: KvOffer, tokens: Sequence[int], count: int) -> None:
        earlier = self._arenas.get(offer.name)
        self._index.extend(offer.name, tokens[earlier.count if earlier else 0 : count])
        self._arenas[offer.name] = _Arena(offer.name, count, offer.size, offer.sequence)
        self._touch(offer.name)

    def _of(self, sequence: SequenceId) -> list[_Arena]:
        return [arena for arena in self._arenas.values() if arena.writer == sequence]

    def _touch(self, name: str) -> None:
        self._uses += 1
        self._arenas[name].last_use = self._uses

    def _evict(self) -> list[str]:
        """Evict arenas whose tokens another arena holds, and beyond the limit the least recently used ones."""
        removed: list[str] = []
        pinned = self.being_adopted()
        by_age = sorted(
            (arena for arena in self._arenas.values() if arena.name not in pinned), key=lambda arena: arena.last_use
        )
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
