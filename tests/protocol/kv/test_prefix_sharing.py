"""Which KV a sequence reuses and which prompt is prefilled next: each token once, and finally every sequence. Cached KV
is within its bound, is found by its longest prefix, and has one owner at a time."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from protocol.common_prefix import common_prefix
from protocol.kv.prefix_index import MIN_SHARED_TOKENS
from protocol.kv.prefix_sharing import Found, PrefixCache, PrefixSharing
from protocol.messages.base import RequestId

CHUNK = 40
LIMIT = 10_000
STEM = list(range(100, 100 + MIN_SHARED_TOKENS - 4))
MEMORY = 50


@dataclass(eq=False)
class FakeKv:
    tokens: list[int] = field(default_factory=list)
    copyable: bool = True

    states: Sequence[int] | None = None
    """Where it can be cut; None: anywhere."""
    size: int | None = None
    """Bytes, if it can't be shortened; else one a token."""
    extra: int = 0
    """Bytes of states beside the rows."""

    @property
    def memory(self) -> int:
        return (len(self.tokens) if self.size is None else self.size) + self.extra

    def shed(self) -> bool:
        shed, self.extra = self.extra > 0, 0
        return shed

    def shorten(self, tokens: int) -> None:
        del self.tokens[tokens:]

    def reach(self, tokens: int) -> int:
        return tokens if self.states is None else max(state for state in (0, *self.states) if state <= tokens)


@dataclass
class FakeSequence:
    prefix: Sequence[int]
    kv: FakeKv = field(default_factory=FakeKv)

    @property
    def prefilled(self) -> int:
        return len(self.kv.tokens)


class Worker:
    """Counts `evaluated` tokens by sequence, without a model."""

    def __init__(self, limit: int = LIMIT, copyable: bool = True, pool: int | None = None) -> None:
        self.live: dict[RequestId, FakeSequence] = {}
        self.closed: list[FakeKv] = []
        self.sharing = PrefixSharing(self.live, limit, self.closed.append, pool)
        self.evaluated: dict[int, int] = {}
        self.copyable = copyable

    def start(self, id: int, prefix: Sequence[int]) -> Found[FakeKv] | None:
        sequence = FakeSequence(prefix, FakeKv(copyable=self.copyable))
        found = self.sharing.find(prefix)
        self.live[RequestId(id)] = sequence
        self.evaluated[id] = 0
        self.take_over(sequence, found)
        return found

    def take_over(self, sequence: FakeSequence, found: Found[FakeKv] | None) -> None:
        if found is not None:
            assert found.exclusive or found.kv.copyable
            assert list(sequence.prefix[: found.tokens]) == found.kv.tokens[: found.tokens]
            sequence.kv = FakeKv(list(sequence.prefix[: found.tokens]), self.copyable)

    def end(self, id: int) -> None:
        self.sharing.end(self.live.pop(RequestId(id)))

    @property
    def waiting(self) -> list[RequestId]:
        """Waiting sequences. After its prefill chunk, a sequence is the last one."""
        return [id for id, sequence in self.live.items() if sequence.prefilled < len(sequence.prefix)]

    def work(self) -> int:
        id, found = self.sharing.next_prefill(self.waiting)
        sequence = self.live[id] = self.live.pop(id)
        self.take_over(sequence, found)
        chunk = sequence.prefix[sequence.prefilled : sequence.prefilled + CHUNK]
        sequence.kv.tokens += chunk
        self.evaluated[id] += len(chunk)
        return id

    def prefill_all(self) -> list[int]:
        turns = []
        while self.waiting:
            turns.append(self.work())
        return turns


def test_a_new_prompt_comes_after_those_that_wait():
    worker = Worker()
    worker.start(0, [0] * 120)
    worker.start(1, [1] * 80)
    worker.work()
    worker.start(2, [2] * 40)

    assert worker.prefill_all() == [1, 0, 2, 1, 0]


def test_a_sequence_that_comes_back_does_not_wait_for_one_that_waited_for_it():
    worker = Worker()
    worker.start(0, range(200))
    worker.start(1, [1] * 200)
    worker.start(2, range(200))
    assert worker.work() == 0
    worker.live.pop(RequestId(0))
    assert worker.work() == 1
    worker.start(0, range(200))
    worker.prefill_all()

    assert worker.evaluated == {0: 0, 1: 200, 2: 200}


@pytest.mark.parametrize(("live", "from_ended"), [(131, True), (132, False)])
def test_an_ended_sequence_is_preferred_to_a_live_one_that_shares_little_more(live: int, from_ended: bool):
    worker = Worker()
    worker.start(0, range(live))
    worker.start(1, [*range(100), 7])
    worker.prefill_all()
    ended = worker.live[RequestId(1)].kv
    worker.end(1)

    found = worker.sharing.find(range(200))
    assert found is not None
    assert (found.kv is ended) == from_ended
    assert list(worker.sharing.cached) == ([] if from_ended else [ended])


def test_a_few_more_tokens_are_not_copied():
    worker = Worker()
    worker.start(0, range(131))
    worker.prefill_all()

    assert worker.sharing.find(range(200), held=100) is None
    assert worker.sharing.find(range(200), held=99) is not None


def test_without_copies_each_sequence_prefills_its_prompt():
    worker = Worker(copyable=False)
    for id in range(2):
        worker.start(id, range(80))

    assert worker.prefill_all() == [0, 1, 0, 1]


def test_without_memory_nothing_is_shared_and_everything_is_closed():
    worker = Worker(limit=0)
    for id in range(2):
        worker.start(id, range(80))
    worker.prefill_all()
    held = [sequence.kv for sequence in worker.live.values()]
    for id in range(2):
        worker.end(id)

    assert worker.evaluated == {0: 80, 1: 80}
    assert worker.closed == held


@pytest.mark.parametrize("seed", range(30))
def test_every_prompt_is_prefilled_in_any_order_of_starts_and_ends(seed: int):
    chance = random.Random(seed)
    worker = Worker(chance.choice((0, 100, LIMIT)), copyable=chance.random() < 0.8)
    for id in range(40):
        for _ in range(chance.randrange(4)):
            if worker.waiting:
                worker.work()
        if id % 8 in worker.live:
            worker.end(id % 8)
        if worker.live and chance.random() < 0.5:
            worker.end(chance.choice(list(worker.live)))
        worker.start(id % 8, [*range(chance.randrange(1, 300)), *chance.choices(range(3), k=chance.randrange(20))])
    worker.prefill_all()

    assert all(list(sequence.prefix) == sequence.kv.tokens for sequence in worker.live.values())


@pytest.mark.parametrize("live", [True, False])
def test_a_state_is_shared_up_to_where_it_can_be_cut(live: bool):
    """An ended sequence and a live one, whose KV has states at 64 and 128 tokens."""
    worker, prompt = Worker(), list(range(200))
    worker.live[RequestId(1)] = FakeSequence(prompt, FakeKv(list(prompt), states=(64, 128)))
    if not live:
        worker.end(1)

    found = worker.sharing.find([*prompt[:140], *range(500, 540)])

    assert found is not None
    assert found.tokens == 128
    assert worker.sharing.find([*prompt[:63], *range(500, 540)]) is None


def test_a_state_that_can_not_be_cut_from_a_longer_one_stays():
    worker, prompt = Worker(), list(range(200))
    for id, length in ((1, 100), (2, 200)):
        worker.live[RequestId(id)] = FakeSequence(prompt[:length], FakeKv(prompt[:length], states=(length,)))
        worker.end(id)

    found = worker.sharing.find([*prompt[:120], *range(500, 540)])

    assert found is not None
    assert found.tokens == 100


def held(worker: Worker) -> int:
    return sum(each.memory for each in worker.sharing.cached) + sum(each.kv.memory for each in worker.live.values())


@pytest.mark.parametrize("live", [False, True])
def test_what_is_not_needed_makes_way_before_a_copy_is_made(live: bool):
    worker = Worker(pool=1_000)
    worker.start(1, [1] * 300)
    worker.prefill_all()
    worker.end(1)
    worker.start(2, [2] * 400)
    worker.prefill_all()
    if not live:
        worker.end(2)

    found = worker.sharing.find([2] * 350 + [3])

    assert found is not None
    assert (found.tokens, found.exclusive) == (350, False)
    assert held(worker) + 350 <= 1_000
    assert [len(kv.tokens) for kv in worker.sharing.cached][-1] == (250 if live else 400)


def test_kv_that_has_no_room_beside_its_copy_is_cut_instead():
    worker = Worker(pool=1_000)
    worker.start(1, [1] * 600)
    worker.prefill_all()
    worker.end(1)

    found = worker.sharing.find([1] * 500 + [2])

    assert found is not None
    assert (found.tokens, found.exclusive) == (500, True)
    assert not list(worker.sharing.cached)


# The cache of ended sequences


class Cached(RuleBasedStateMachine):
    """Beside the cache, the tokens of all KV that was added and not closed. Every third can't be copied."""

    def __init__(self):
        super().__init__()
        self.closed: list[FakeKv] = []
        self.cache = PrefixCache[FakeKv](MEMORY, self.closed.append)
        self.held: dict[FakeKv, list[int]] = {}
        self.made = 0

    @rule(tail=st.lists(st.integers(0, 1), max_size=80), memory=st.integers(0, 60))
    def add(self, tail, memory):
        self.made += 1
        kv = FakeKv(STEM + tail, copyable=self.made % 3 > 0, size=memory)
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
        assert {*self.cache} == self.held.keys()
        assert self.cache.size == sum(kv.memory for kv in self.held) <= MEMORY

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
    prompts = [[number] * MIN_SHARED_TOKENS for number in range(4)]
    a, b, c, d = (FakeKv(size=10) for _ in prompts)
    for kv, prompt in zip((a, b, c), prompts, strict=False):
        cache.add(kv, [*prompt, *range(MIN_SHARED_TOKENS)])
    assert cache.take(prompts[0]) == (a, MIN_SHARED_TOKENS, False)
    cache.add(d, prompts[3])

    assert closed == [b]


def test_of_kv_that_does_not_fit_states_go_first_and_then_the_last_tokens():
    closed: list[FakeKv] = []
    cache = PrefixCache[FakeKv](650, closed.append)
    first, second = list(range(600)), list(range(1000, 2000))
    with_states = FakeKv(first[:], extra=200)

    assert cache.add(with_states, first) == 600
    assert cache.add(FakeKv(second[:]), second) == 650
    assert closed == [with_states]
    assert cache.take(second) is not None


def test_a_smaller_limit_cuts_the_kv_that_was_used_least_recently():
    cache = PrefixCache[FakeKv](1000, lambda _: None)
    for first in (1000, 2000):
        tokens = list(range(first, first + 500))
        cache.add(FakeKv(tokens[:]), tokens)
    cache.resize(700)
    found = [cache.take(range(first, first + 600)) for first in (1000, 2000)]

    assert [each and each.tokens for each in found] == [200, 500]
