"""Shares the KV of common prefixes between a worker's sequences, live and ended, and orders their prefills accordingly.

Pure; knows no model and no message flow. The KV never leaves the worker's process.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from protocol.common_prefix import common_prefix
from protocol.kv.prefix_index import MIN_SHARED_TOKENS, PrefixIndex
from protocol.messages.base import RequestId


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


_Kv = TypeVar("_Kv", bound=ReusableKv, covariant=True)


class LiveSequence(Protocol[_Kv]):
    """What prefix sharing reads of a live sequence."""

    @property
    def kv(self) -> _Kv: ...

    @property
    def prefix(self) -> Sequence[int]:
        """Tokens before the root."""
        ...

    @property
    def prefilled(self) -> int:
        """Number of the first tokens that have KV."""
        ...


class _Leader(NamedTuple):
    """An earlier sequence that prefills the first `shared` tokens."""

    id: RequestId
    shared: int


class Cut(NamedTuple):
    """Of an ended sequence's KV the first tokens alone are kept, because the rest does not fit."""

    kept: int
    tokens: int
    memory: int
    """Bytes of all of it."""


class PrefixSharing(Generic[Kv]):
    """Avoids that a token is evaluated whose prefix another sequence, live or ended, has evaluated."""

    def __init__(
        self,
        live: Mapping[RequestId, LiveSequence[Kv]],
        limit: int,
        close: Callable[[Kv], None],
        pool: int | None = None,
    ) -> None:
        """`live`: the worker's table of its sequences. `limit`: bytes of KV of ended sequences; 0 turns sharing off.
        `close` is called for KV that is not needed any more. `pool`: bytes of KV of live and ended sequences together;
        what live ones take, ended ones can't have."""
        self._live = live
        self._limit = limit
        self._pool = pool
        self._close = close
        self._cache: PrefixCache[Kv] = PrefixCache(limit, close)
        self._leaders: dict[RequestId, _Leader | None] = {}
        """By sequence with tokens to prefill, in the order of arrival: the sequence that it waits for."""

    @property
    def on(self) -> bool:
        """Sequences share KV at all."""
        return self._limit > 0

    @property
    def cached(self) -> Iterator[Kv]:
        """KV of ended sequences."""
        return iter(self._cache)

    def find(self, tokens: Sequence[int], held: int = 0) -> Found[Kv] | None:
        """The KV that shares the longest prefix with `tokens`, if that has MIN_SHARED_TOKENS more than `held`.

        The KV of an ended sequence is preferred, since it may need no copy, unless a live one shares MIN_SHARED_TOKENS
        more. For a copy, the pool has room once this returns.
        """
        if not self._limit:
            return None
        copyable = [sequence for sequence in self._live.values() if sequence.kv.copyable]
        live = [(each.kv.reach(shared_tokens(each, tokens)), each) for each in copyable]
        most, best = max(live, key=lambda found: found[0], default=(0, None))
        least = held + MIN_SHARED_TOKENS
        room = None if self._pool is None else self._pool - self._live_memory()
        cached = self._cache.take(tokens, max(least, most - MIN_SHARED_TOKENS + 1), room)
        if cached is not None or best is None or most < least:
            return cached
        if room is not None:
            self._cache.resize(max(0, min(self._limit, room - best.kv.memory * most // best.prefilled)))
        return Found(best.kv, most, exclusive=False)

    def shared(self, tokens: Sequence[int]) -> int:
        """How many of the first `tokens` another sequence has too, whether or not its KV can be cut there."""
        live = max((shared_tokens(each, tokens) for each in self._live.values()), default=0)
        return max(live, self._cache.shared(tokens)) if self._limit else 0

    def end(self, sequence: LiveSequence[Kv]) -> Cut | None:
        """The sequence has ended, and is no longer live: others may use its KV. Returns what did not fit."""
        if not self._limit:
            self._close(sequence.kv)
            return None
        self.fit()
        tokens, memory = sequence.prefix[: sequence.prefilled], sequence.kv.memory
        kept = self._cache.add(sequence.kv, tokens)
        return Cut(kept, len(tokens), memory) if memory and MIN_SHARED_TOKENS <= len(tokens) != kept else None

    def fit(self) -> None:
        """Live sequences have begun or grown: let go of KV of ended ones, and of states of live ones, that the pool
        has no room for."""
        if self._pool is None or not self._limit:
            return
        live = self._live_memory()
        while live > self._pool and any(sequence.kv.shed() for sequence in self._live.values()):
            live = self._live_memory()
        self._cache.resize(max(0, min(self._limit, self._pool - live)))

    def _live_memory(self) -> int:
        return sum(sequence.kv.memory for sequence in self._live.values())

    def clear(self) -> bool:
        """Free the KV of ended sequences. Returns whether there was any."""
        return self._cache.clear()

    def next_prefill(self, waiting: Sequence[RequestId]) -> tuple[RequestId, Found[Kv] | None]:
        """The sequence to prefill next, and the KV that it waited for, if it waited.

        `waiting`: all live sequences with tokens to prefill, at least one, in the order of their turns. A sequence
        waits while an earlier one prefills the prefix that both share.
        """
        self._update_leaders(waiting)
        id = next(id for id in waiting if not self._waits(id))
        waited = self._leaders[id] is not None
        self._leaders[id] = None
        sequence = self._live[id]
        return id, self.find(sequence.prefix, sequence.prefilled) if waited else None

    def _update_leaders(self, waiting: Sequence[RequestId]) -> None:
        for id, leader in self._leaders.items():
            if leader is not None and leader.id not in waiting:
                # If the leader prefills again it may wait for this one, and two must not wait for each other.
                self._leaders[id] = leader._replace(shared=0)
        self._leaders = {id: leader for id, leader in self._leaders.items() if id in waiting}
        for id in waiting:
            if id not in self._leaders:
                self._leaders[id] = self._leader(self._live[id])

    def _waits(self, id: RequestId) -> bool:
        leader = self._leaders[id]
        return leader is not None and leader.shared > 0 and self._live[leader.id].prefilled < leader.shared

    def _leader(self, sequence: LiveSequence[Kv]) -> _Leader | None:
        """The earlier sequence that will prefill the longest shared prefix, if waiting for it pays."""
        if not self._limit:
            return None
        prefix = sequence.prefix
        earlier = [(id, self._live[id]) for id in self._leaders if self._live[id].kv.copyable]
        leaders = [_Leader(id, common_prefix(other.prefix, prefix)) for id, other in earlier]
        best = max(leaders, key=lambda leader: leader.shared, default=None)
        return best if best and best.shared >= sequence.prefilled + MIN_SHARED_TOKENS else None


def shared_tokens(sequence: LiveSequence[ReusableKv], tokens: Sequence[int]) -> int:
    """Number of the first of `tokens` that the sequence has KV of."""
    return min(common_prefix(sequence.prefix, tokens), sequence.prefilled)


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
