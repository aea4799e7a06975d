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


class PrefixCache(Generic[Kv]):
    """At most `limit` bytes. An entry that another one covers is evicted first, then the least recently used."""

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

    def add(self, kv: Kv, tokens: Sequence[int]) -> None:
        """Add the KV of `tokens`. The caller must not use it any more."""
        size = kv.memory
        if len(tokens) < MIN_SHARED_TOKENS or not 0 < size <= self._limit:
            self._close(kv)
            return
        name = next(self._names)
        self._entries[name] = _CacheEntry(kv, len(tokens), size)
        self._index.extend(name, tokens)
        if kv.reach(len(tokens) - 1) == len(tokens) - 1:
            self._evict_covered(name)
        while self.size > self._limit:
            self._evict(next(iter(self._entries)))

    def take(self, tokens: Sequence[int], least: int = MIN_SHARED_TOKENS) -> Found[Kv] | None:
        """The entry that shares the longest prefix with `tokens`, if that has `least` tokens. Of several entries the
        most recently used one.

        An entry that holds many more tokens stays, to be copied. One that can't be copied is then taken only if fewer
        tokens are lost than gained.
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
        self._entries.move_to_end(name)
        return Found(entry.kv, kept, exclusive=False)

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
