"""Cached KV is within its bound, is found by its longest prefix, and has one owner at a time."""

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from protocol.common_prefix import common_prefix
from protocol.kv.prefix_index import MIN_SHARED_TOKENS
from protocol.kv.prefix_sharing import PrefixCache

STEM = list(range(100, 100 + MIN_SHARED_TOKENS - 4))
LIMIT = 50


@dataclass(eq=False)
class FakeKv:
    number: int
    memory: int
    copyable: bool = True
    states: int = 0
    """Bytes of states beside the rows."""
    rows: int = 0
    """Tokens that it holds, if it can be shortened."""

    def reach(self, tokens: int) -> int:
        return tokens

    def shed(self) -> bool:
        self.memory -= self.states
        shed, self.states = self.states > 0, 0
        return shed

    def shorten(self, tokens: int) -> None:
        if self.rows:
            self.memory, self.rows = self.memory * tokens // self.rows, tokens


class Cached(RuleBasedStateMachine):
    """Beside the cache, the tokens of all KV that was added and not closed. Every third can't be copied."""

    def __init__(self):
        super().__init__()
        self.closed: list[FakeKv] = []
        self.cache = PrefixCache[FakeKv](LIMIT, self.closed.append)
        self.held: dict[FakeKv, list[int]] = {}
        self.made = 0

    @rule(tail=st.lists(st.integers(0, 1), max_size=80), memory=st.integers(0, 60))
    def add(self, tail, memory):
        self.made += 1
        kv = FakeKv(self.made, memory, copyable=self.made % 3 > 0)
        self.held[kv] = STEM + tail
        self.cache.add(kv, STEM + tail)
        for kv in self.closed:
            del self.held[kv]
        self.closed.clear()

    @rule(data=st.data(), tail=st.lists(st.integers(0, 1), max_size=80), more=st.integers(0, 40))
    def take(self, data, tail, more):
        wanted = STEM + tail
        if self.held and data.draw(st.booleans()):
            wanted = data.draw(st.sampled_from(list(self.held.values()))) + tail
        least = MIN_SHARED_TOKENS + more
        found = self.cache.take(wanted, least)

        best = max((common_prefix(tokens, wanted) for tokens in self.held.values()), default=0)
        if found is None:
            assert best < least or not all(kv.copyable for kv in self.held)
            return
        tokens = self.held[found.kv]
        assert found.tokens == common_prefix(tokens, wanted) == best >= least
        if found.exclusive:
            lost = len(tokens) - found.tokens
            assert lost < MIN_SHARED_TOKENS or (not found.kv.copyable and lost < found.tokens)
            del self.held[found.kv]
        else:
            assert found.kv.copyable

    @invariant()
    def the_bound_holds_and_no_kv_is_lost(self):
        assert sorted(kv.number for kv in self.cache) == sorted(kv.number for kv in self.held)
        assert self.cache.size == sum(kv.memory for kv in self.held) <= LIMIT

    @invariant()
    def nothing_is_held_twice(self):
        everyone = list(self.held.values())
        assert not any(one is not other and one == other[: len(one)] for one in everyone for other in everyone)

    @invariant()
    def all_cached_kv_is_long_enough(self):
        assert all(kv.memory and len(tokens) >= MIN_SHARED_TOKENS for kv, tokens in self.held.items())


TestCached = Cached.TestCase
TestCached.settings = settings(max_examples=50, stateful_step_count=30, derandomize=True)


def test_the_least_recently_used_is_evicted_first():
    closed: list[FakeKv] = []
    cache = PrefixCache[FakeKv](30, closed.append)
    a, b, c, d = (FakeKv(number, 10) for number in range(4))
    prompts = {kv: [kv.number] * MIN_SHARED_TOKENS for kv in (a, b, c, d)}
    for kv in (a, b, c):
        cache.add(kv, [*prompts[kv], *range(MIN_SHARED_TOKENS)])
    assert cache.take(prompts[a]) == (a, MIN_SHARED_TOKENS, False)
    cache.add(d, prompts[d])

    assert closed == [b]


def test_of_kv_that_does_not_fit_states_go_first_and_then_the_last_tokens():
    closed: list[FakeKv] = []
    cache = PrefixCache[FakeKv](100, closed.append)

    assert cache.add(FakeKv(1, 120, states=30, rows=600), range(600)) == 600
    assert cache.add(FakeKv(2, 200, rows=1000), range(1000, 2000)) == 500
    assert [kv.number for kv in closed] == [1]
    assert cache.take(range(1000, 2000)) is not None


def test_a_smaller_limit_cuts_the_kv_that_was_used_least_recently():
    cache = PrefixCache[FakeKv](100, lambda _: None)
    for number in (1, 2):
        cache.add(FakeKv(number, 50, rows=500), range(1000 * number, 1000 * number + 500))
    cache.resize(70)
    found = [cache.take(range(1000 * number, 1000 * number + 600)) for number in (1, 2)]

    assert [each and each.tokens for each in found] == [200, 500]
