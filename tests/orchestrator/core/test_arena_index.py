"""The library finds the longest prefix that some arena holds, stays within its bound, and forgets for good."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orchestrator.core.prefills import ArenaIndex, PrefillCosts
from protocol.kv.prefix_index import MIN_SHARED_TOKENS
from protocol.messages.base import RequestId
from protocol.messages.kv import KvOffer, KvReference

STEM = list(range(100, 100 + MIN_SHARED_TOKENS))
LIMIT = 100


def offer(sequence: int, name: str, tokens: int, size: int = 10) -> KvOffer:
    return KvOffer(RequestId(sequence), name, tokens, size, 0.0)


class Library(RuleBasedStateMachine):
    """Sequences over two tokens share many prefixes; a plain model remembers what was offered and given up."""

    def __init__(self):
        super().__init__()
        self.library = ArenaIndex(LIMIT)
        self.requests: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.held: dict[str, tuple[int, list[int], int]] = {}
        """Name: writer or the last one, tokens and size."""
        self.gone: set[str] = set()
        self.lent: dict[int, str] = {}
        self.names = 0

    def live(self) -> list[int]:
        return sorted(set(self.requests) - self.ended)

    def give_up(self, names: list[str]) -> None:
        for name in names:
            assert name not in self.lent.values(), "it was to be adopted"
            self.held.pop(name, None)
            self.gone.add(name)

    @rule(tail=st.lists(st.integers(0, 1), max_size=12), short=st.booleans())
    def begin(self, tail, short):
        self.requests[len(self.requests)] = (STEM[:-5] if short else list(STEM)) + tail

    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=6), size=st.integers(1, 60))
    def offered(self, data, more, size):
        if not self.live():
            return
        id = data.draw(st.sampled_from(self.live()))
        self.requests[id] += more
        again = [name for name, (writer, _, _) in self.held.items() if writer == id]
        again += sorted(name for name in self.gone if name.startswith(f"{id}-") and name not in self.lent.values())
        self.names += 1
        name = data.draw(st.sampled_from([*again, f"{id}-{self.names}"]))
        self.take_in(name, id, self.requests[id], data.draw(st.integers(1, len(self.requests[id]) + 2)), size)

    @rule(data=st.data(), size=st.integers(1, 60))
    def a_later_turn_goes_on_with_the_arena_of_an_earlier_one(self, data, size):
        free = [(name, tokens) for name, (writer, tokens, _) in self.held.items() if writer in self.ended]
        pairs = [(name, id) for name, held in free for id in self.live() if self.requests[id][: len(held)] == held]
        if pairs:
            name, id = data.draw(st.sampled_from(pairs))
            self.take_in(name, id, self.requests[id], len(self.requests[id]), size)

    def take_in(self, name: str, id: int, tokens: list[int], count: int, size: int) -> None:
        given_up = self.library.offer(offer(id, name, count, size), tokens)
        self.held[name] = (id, tokens[: max(count, len(self.held.get(name, (id, [], 0))[1]))], size)
        self.give_up(given_up)

    @rule(data=st.data())
    def ends(self, data):
        if self.live():
            id = data.draw(st.sampled_from(self.live()))
            self.ended.add(id)
            self.lent.pop(id, None)
            self.give_up(self.library.request_ended(RequestId(id)))

    @rule(data=st.data())
    def unusable(self, data):
        free = sorted(set(self.held) - set(self.lent.values()))
        if free:
            name = data.draw(st.sampled_from(free))
            assert self.library.drop(name) == [name]
            self.give_up([name])

    @rule(tail=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def find(self, tail):
        self.check(STEM + tail)

    @rule(data=st.data())
    def adopt(self, data):
        if self.live():
            id = data.draw(st.sampled_from(self.live()))
            found = self.check(self.requests[id])
            for pins, request in ((self.library.pinned, RequestId(id)), (self.lent, id)):
                pins.pop(request, None)
                if found:
                    pins[request] = found.name

    @rule(data=st.data())
    def has_adopted(self, data):
        if self.lent:
            id = data.draw(st.sampled_from(sorted(self.lent)))
            del self.lent[id]
            self.give_up(self.library.unpin(RequestId(id)))

    def check(self, wanted: list[int]) -> KvReference | None:
        found = self.library.find(wanted)

        best = max((shared(tokens, wanted[:-1]) for _, tokens, _ in self.held.values()), default=0)
        assert (found.tokens if found else 0) == (best if best >= MIN_SHARED_TOKENS else 0)
        if found:
            assert found.name not in self.gone
            assert self.held[found.name][1][: found.tokens] == wanted[: found.tokens]
            assert found.tokens < len(wanted)
        return found

    @invariant()
    def the_bound_holds_but_for_what_is_being_adopted(self):
        assert self.library.size == sum(size for _, _, size in self.held.values())
        assert self.lent or self.library.size <= LIMIT

    @invariant()
    def a_live_sequence_has_one_arena(self):
        writers = [writer for writer, _, _ in self.held.values() if writer not in self.ended]
        assert len(writers) == len(set(writers))

    @invariant()
    def the_index_holds_what_the_arenas_hold(self):
        held = [tokens for _, tokens, _ in self.held.values()]
        assert self.library.indexed == len({tuple(each[:end]) for each in held for end in range(1, len(each) + 1)})


def shared(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


TestLibrary = Library.TestCase
TestLibrary.settings = settings(max_examples=150, stateful_step_count=40, derandomize=True)


def test_the_arena_that_was_not_used_for_longest_goes_first():
    library = ArenaIndex(30)
    tokens = [[*STEM, id] for id in range(4)]
    for id in range(3):
        library.offer(offer(id, f"arena {id}", MIN_SHARED_TOKENS + 1), tokens[id])
    library.find([*tokens[0], 9])

    assert library.offer(offer(3, "arena 3", MIN_SHARED_TOKENS + 1), tokens[3]) == ["arena 1"]
    assert library.find([*tokens[0], 9]) == KvReference("arena 0", MIN_SHARED_TOKENS + 1)


@pytest.mark.parametrize("over", [False, True])
def test_an_arena_does_not_pass_to_a_sequence_of_other_tokens(over: bool):
    library = ArenaIndex(LIMIT)
    library.offer(offer(1, "arena", MIN_SHARED_TOKENS), STEM)
    if over:
        library.request_ended(RequestId(1))

    assert library.offer(offer(2, "arena", MIN_SHARED_TOKENS), STEM[::-1]) == []
    assert library.find([*STEM[::-1], 1]) is None
    assert library.find([*STEM, 1]) == KvReference("arena", MIN_SHARED_TOKENS)


def test_the_arena_of_a_live_sequence_does_not_pass_to_another_one():
    library = ArenaIndex(LIMIT)
    library.offer(offer(1, "arena", MIN_SHARED_TOKENS), STEM)

    assert library.offer(offer(2, "arena", MIN_SHARED_TOKENS + 1), [*STEM, 1]) == []
    assert library.find([*STEM, 1, 2]) == KvReference("arena", MIN_SHARED_TOKENS)


def measured(target: float, worker: float, adoption: float = 0.0) -> PrefillCosts:
    """After two prompts of 100 tokens each; figures in seconds a token."""
    choice = PrefillCosts("auto")
    choice.observe_target(100, 0, 100 * target)
    choice.observe_target(0, 100, 100 * adoption)
    for _ in range(2):
        choice.observe_worker(100, 100 * worker)
    return choice


@pytest.mark.parametrize(
    ("target", "worker", "adoption", "held", "pays"),
    [
        (2.0, 1.0, 0.5, 0, True),
        (1.0, 2.0, 0.0, 0, False),
        (1.0, 0.9, 0.2, 0, False),
        (2.0, 1.0, 0.0, 600, False),
        (2.0, 1.0, 0.0, 400, True),
        (9.0, 1.0, 0.0, 990, False),
    ],
)
def test_a_prefill_worker_reads_what_it_reads_faster(target, worker, adoption, held, pays):
    assert measured(target, worker, adoption).worker_pays(1000, held) is pays


def test_the_target_is_measured_first_and_the_worker_then_gets_its_trial():
    choice = PrefillCosts("auto")
    assert not choice.worker_pays(1000, 0)

    choice.observe_target(500, 0, 5.0)
    assert choice.worker_pays(1000, 0)
    choice.observe_worker(500, 50.0)
    choice.observe_worker(500, 50.0)

    assert not choice.worker_pays(1000, 0)


def test_always_means_whenever_there_is_enough_to_read_and_patience_ends():
    """When the target would have been ready twice."""
    choice = PrefillCosts("always")

    assert choice.worker_pays(1000, 0)
    assert not choice.worker_pays(1000, 1000 - MIN_SHARED_TOKENS + 1)
    assert choice.timeout(1000) > 5
    assert measured(0.01, 0.001).timeout(1000) == pytest.approx(20)
    assert measured(0.00001, 0.00001).timeout(1000) == 1.0
