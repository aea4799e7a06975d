"""The prefix cache: KV of ended sequences in a worker's memory, for sequences with the same prefix. Pure."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from protocol.kv.prefix_index import MIN_SHARED_TOKENS, PrefixIndex


class ReusableKv(Protocol):
    """The KV of a sequence's first tokens, which another sequence may begin with."""

    @property
    def memory(self) -> int:
        """Bytes; 0 if there is nothing worth caching."""
        ...

    @property
    def copyable(self) -> bool:
        """Whether a sequence can begin with a copy of it, while it stays as it is."""
        ...

    def reach(self, tokens: int) -> int:
        """The most of its first `tokens` tokens to which it can be cut: a recurrent state remembers few of them."""
        ...

    def shed(self) -> bool:
        """Forget one state to which it could be cut, the one that is needed least. Whether there was one."""
        ...

    def shorten(self, tokens: int) -> None:
        """Keep the first `tokens`, a number that `reach` has given, and free the memory of the rest."""
        ...


Kv = TypeVar("Kv", bound=ReusableKv)


class Found(NamedTuple, Generic[Kv]):
    """KV whose first `tokens` tokens are the requested ones."""

    kv: Kv
    tokens: int
    exclusive: bool
    """The caller owns the KV. Otherwise it stays in use and the caller has to copy it."""


class _CacheEntry(NamedTuple, Generic[Kv]):
    kv: Kv
    tokens: int
    size: int

    def measured(self) -> "_CacheEntry[Kv]":
        """With the size that the KV has now."""
        return self._replace(size=self.kv.memory)


_SMALLEST_CUT = 8
"""A cut frees at least one part in so many."""


class PrefixCache(Generic[Kv]):
    """At most `limit` bytes. An entry that another one covers is evicted first, then the least recently used.

    What does not fit whole is kept as far as it goes: with fewer states, then with its first tokens.
    """

    def __init__(self, limit: int, close: Callable[[Kv], None]) -> None:
        """`close` is called for KV that is evicted or refused."""
        self._limit = limit
        self._close = close
        self._names = itertools.count()
        self._entries: OrderedDict[int, _CacheEntry[Kv]] = OrderedDict()
        """Least recently used first."""
        self._index: PrefixIndex[int] = PrefixIndex()

    def __iter__(self) -> Iterator[Kv]:
        return (entry.kv for entry in self._entries.values())

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(entry.size for entry in self._entries.values())

    def add(self, kv: Kv, tokens: Sequence[int]) -> int:
        """Add the KV of `tokens`. The caller must not use it any more. Returns how many of them are kept."""
        kept = _fitted(kv, len(tokens), self._limit) if kv.memory else 0
        if kept < MIN_SHARED_TOKENS:
            self._close(kv)
            return 0
        name = next(self._names)
        self._entries[name] = _CacheEntry(kv, kept, kv.memory)
        self._index.extend(name, tokens[:kept])
        if kv.reach(kept - 1) == kept - 1:
            self._evict_covered(name)
        self.resize(self._limit)
        return kept

    def resize(self, limit: int) -> None:
        """Hold at most `limit` bytes from now on: first with fewer states, then with fewer tokens."""
        self._limit = limit
        self._shrink(limit)

    def _shrink(self, limit: int) -> None:
        for name in list(self._entries):
            while self.size > limit and self._entries[name].kv.shed():
                self._entries[name] = self._entries[name].measured()
        while (excess := self.size - limit) > 0:
            self._reduce(next(iter(self._entries)), excess)

    def take(self, tokens: Sequence[int], least: int = MIN_SHARED_TOKENS, room: int | None = None) -> Found[Kv] | None:
        """The entry that shares the longest prefix with `tokens`, if that has `least` tokens. Of several entries the
        most recently used one.

        An entry that holds many more tokens stays, to be copied. One that can't be copied is then taken only if fewer
        tokens are lost than gained. `room`: bytes for all entries and such a copy, which other entries make way for
        now. An entry that has no room beside its copy is taken.
        """
        name, kept = self._best(tokens)
        if kept < least:
            return None
        entry = self._entries[name]
        lost = entry.tokens - kept
        if lost < MIN_SHARED_TOKENS or (lost < kept and not entry.kv.copyable):
            self._remove(name)
            return Found(entry.kv, kept, exclusive=True)
        if not entry.kv.copyable:
            return None
        left = 0 if room is None else room - entry.size - entry.size * kept // entry.tokens
        if left < 0:
            self._remove(name)
            return Found(entry.kv, kept, exclusive=True)
        del self._entries[name]
        if room is not None:
            self._shrink(left)
        self._entries[name] = entry
        return Found(entry.kv, kept, exclusive=False)

    def shared(self, tokens: Sequence[int]) -> int:
        """The longest prefix that an entry shares with `tokens`, whether or not its KV can be cut there."""
        return self._index.longest(tokens).tokens

    def clear(self) -> bool:
        """Evict everything. Returns whether there was anything."""
        held = list(self._entries)
        for name in held:
            self._evict(name)
        return bool(held)

    def _best(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The entry whose KV holds most of the first tokens, and how many; 0 if there is none."""
        ages = {name: age for age, name in enumerate(self._entries)}
        best, most = -1, 0
        for shared in self._index.shared(tokens):
            if shared.tokens <= most:
                break
            reach = {name: self._entries[name].kv.reach(shared.tokens) for name in shared.names}
            name = max(shared.names, key=lambda name: (reach[name], ages[name]))
            best, most = (name, reach[name]) if reach[name] > most else (best, most)
        return best, most

    def _reduce(self, name: int, excess: int) -> None:
        """Cut an entry by so many bytes, or by an eighth if that is more, since a cut copies the rest; or evict it."""
        entry = self._entries[name]
        kept = _fitted(entry.kv, entry.tokens, entry.size - max(excess, entry.size // _SMALLEST_CUT))
        if kept < max(MIN_SHARED_TOKENS, entry.tokens // _SMALLEST_CUT):
            self._evict(name)
            return
        self._entries[name] = entry.measured()._replace(tokens=kept)
        self._index.shorten(name, kept)
        if self._index.covered(name) and entry.kv.reach(kept - 1) == kept - 1:
            self._evict(name)

    def _evict_covered(self, name: int) -> None:
        """The entries that another one covers, once `name` is added: they can be cut from it."""
        for other in [other for other in self._entries if other != name and self._index.covered(other)]:
            self._evict(other)
        if self._index.covered(name):
            self._evict(name)

    def _evict(self, name: int) -> None:
        self._close(self._remove(name).kv)

    def _remove(self, name: int) -> _CacheEntry[Kv]:
        self._index.remove(name)
        return self._entries.pop(name)


def _fitted(kv: ReusableKv, tokens: int, limit: int) -> int:
    """Reduce the KV of so many tokens to `limit` bytes; the tokens that it holds then, 0 if it can't be."""
    while kv.memory > limit and kv.shed():
        pass
    size = kv.memory
    if size <= limit:
        return tokens
    kept = kv.reach(tokens * max(0, limit) // size)
    if kept < MIN_SHARED_TOKENS:
        return 0
    kv.shorten(kept)
    return kept if kv.memory <= limit else 0
