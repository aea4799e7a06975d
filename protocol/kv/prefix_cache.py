"""KV of sequences that are over, in a worker's own memory, for sequences that begin alike. Pure; knows no model."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from protocol.kv.prefix_index import PrefixIndex

Kv = TypeVar("Kv")

MIN_SHARED_TOKENS = 32
"""Tokens: so few are evaluated in little more than the time of one forward."""


class Found(NamedTuple, Generic[Kv]):
    """KV whose first `tokens` tokens are the wanted ones."""

    kv: Kv
    tokens: int
    free: bool
    """It belongs to whoever asked; otherwise somebody goes on with it, and it has to be copied."""


@dataclass(frozen=True, slots=True)
class _CacheEntry(Generic[Kv]):
    kv: Kv
    tokens: int
    size: int


class PrefixCache(Generic[Kv]):
    """At most `limit` bytes; what another one holds as well goes first, then what was not used for longest."""

    def __init__(self, limit: int, let_go: Callable[[Kv], None]) -> None:
        """`let_go` is called for each that is given up."""
        self._limit = limit
        self._let_go = let_go
        self._names = itertools.count()
        self._kept: OrderedDict[int, _CacheEntry[Kv]] = OrderedDict()
        """Least recently used first."""
        self._index: PrefixIndex[int] = PrefixIndex()

    def __iter__(self) -> Iterator[Kv]:
        return (one.kv for one in self._kept.values())

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(one.size for one in self._kept.values())

    def keep(self, kv: Kv, tokens: Sequence[int], size: int) -> None:
        """Take in the KV of `tokens`, `size` bytes; nobody else may use it from now on."""
        if len(tokens) < MIN_SHARED_TOKENS or size > self._limit:
            self._let_go(kv)
            return
        name = next(self._names)
        self._kept[name] = _CacheEntry(kv, len(tokens), size)
        self._index.extend(name, tokens)
        for other in [other for other in self._kept if other != name and self._index.covered(other)]:
            self._give_up(other)
        if self._index.covered(name):
            self._give_up(name)
        while self.size > self._limit:
            self._give_up(next(iter(self._kept)))

    def take(self, tokens: Sequence[int], copyable: Callable[[Kv], bool]) -> Found[Kv] | None:
        """What shares the longest prefix with `tokens`, of several the one that was used last.

        It stays, to be copied, if it holds much beyond that; one that can't be copied is then taken only if less is
        lost than gained.
        """
        shared = self._index.longest(tokens)
        if shared.tokens < MIN_SHARED_TOKENS:
            return None
        ages = {name: age for age, name in enumerate(self._kept)}
        name = max(shared.names, key=ages.__getitem__)
        kept = self._kept[name]
        lost = kept.tokens - shared.tokens
        if lost < MIN_SHARED_TOKENS or (lost < shared.tokens and not copyable(kept.kv)):
            self._forget(name)
            return Found(kept.kv, shared.tokens, free=True)
        if not copyable(kept.kv):
            return None
        self._kept.move_to_end(name)
        return Found(kept.kv, shared.tokens, free=False)

    def _give_up(self, name: int) -> None:
        self._let_go(self._forget(name).kv)

    def _forget(self, name: int) -> _CacheEntry[Kv]:
        self._index.remove(name)
        return self._kept.pop(name)
