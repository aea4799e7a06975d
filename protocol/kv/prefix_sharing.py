"""Shares the KV of common prefixes between a worker's sequences, and orders their prefills accordingly.

Pure; knows no model and no message flow. The KV never leaves the worker's process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from protocol.common_prefix import common_prefix
from protocol.kv.prefix_cache import Found, Kv, PrefixCache, ReusableKv
from protocol.kv.prefix_index import MIN_SHARED_TOKENS
from protocol.messages.base import SequenceId

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

    id: SequenceId
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
        live: Mapping[SequenceId, LiveSequence[Kv]],
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
        self._leaders: dict[SequenceId, _Leader | None] = {}
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

    def next_prefill(self, waiting: Sequence[SequenceId]) -> tuple[SequenceId, Found[Kv] | None]:
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

    def _update_leaders(self, waiting: Sequence[SequenceId]) -> None:
        for id, leader in self._leaders.items():
            if leader is not None and leader.id not in waiting:
                # If the leader prefills again it may wait for this one, and two must not wait for each other.
                self._leaders[id] = leader._replace(shared=0)
        self._leaders = {id: leader for id, leader in self._leaders.items() if id in waiting}
        for id in waiting:
            if id not in self._leaders:
                self._leaders[id] = self._leader(self._live[id])

    def _waits(self, id: SequenceId) -> bool:
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
