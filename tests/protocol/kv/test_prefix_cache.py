"""What is kept is within its bound, is found by its longest prefix, and has one owner at a time."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from protocol.kv.prefix_cache import MIN_SHARED_TOKENS, PrefixCache

STEM = list(range(100, 100 + MIN_SHARED_TOKENS - 4))
LIMIT = 50


class Kept(RuleBasedStateMachine):
    """KV is a number here; every third can't be copied."""

    def __init__(self):
        super().__init__()
        self.gone: list[int] = []
        self.kept = PrefixCache[int](LIMIT, self.gone.append)
        self.held: dict[int, tuple[list[int], int]] = {}
        self.made = 0

    @rule(tail=st.lists(st.integers(0, 1), max_size=80), size=st.integers(1, 60))
    def keep(self, tail, size):
        self.made += 1
        self.held[self.made] = (STEM + tail, size)
        self.kept.keep(self.made, STEM + tail, size)
        for kv in self.gone:
            del self.held[kv]
        self.gone.clear()

    @rule(data=st.data(), tail=st.lists(st.integers(0, 1), max_size=80))
    def take(self, data, tail):
        wanted = STEM + tail
        if self.held and data.draw(st.booleans()):
            wanted = data.draw(st.sampled_from([tokens for tokens, _ in self.held.values()])) + tail
        found = self.kept.take(wanted, lambda kv: kv % 3 > 0)

        best = max((shared(tokens, wanted) for tokens, _ in self.held.values()), default=0)
        if found is None:
            assert best < MIN_SHARED_TOKENS or any(kv % 3 == 0 for kv in self.held)
            return
        tokens, _ = self.held[found.kv]
        assert found.tokens == shared(tokens, wanted) == best >= MIN_SHARED_TOKENS
        if found.free:
            lost = len(tokens) - found.tokens
            assert lost < MIN_SHARED_TOKENS or (found.kv % 3 == 0 and lost < found.tokens)
            del self.held[found.kv]
        else:
            assert found.kv % 3 > 0

    @invariant()
    def the_bound_holds_and_nobody_is_lost(self):
        assert sorted(self.kept) == sorted(self.held)
        assert self.kept.size == sum(size for _, size in self.held.values()) <= LIMIT

    @invariant()
    def nothing_is_held_twice(self):
        everyone = [tokens for tokens, _ in self.held.values()]
        assert not any(one is not other and one == other[: len(one)] for one in everyone for other in everyone)


def shared(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


TestKept = Kept.TestCase
TestKept.settings = settings(max_examples=50, stateful_step_count=30, deadline=None, derandomize=True)


def test_what_was_not_used_for_longest_goes_first():
    gone: list[str] = []
    kept = PrefixCache[str](30, gone.append)
    prompts = {name: [seed] * MIN_SHARED_TOKENS for seed, name in enumerate("abcd")}
    for name in "abc":
        kept.keep(name, [*prompts[name], *range(MIN_SHARED_TOKENS)], 10)
    assert kept.take(prompts["a"], lambda _: True) == ("a", MIN_SHARED_TOKENS, False)
    kept.keep("d", prompts["d"], 10)

    assert gone == ["b"]


def test_a_conversation_that_goes_on_takes_what_is_there():
    kept = PrefixCache[str](30, lambda _: None)
    kept.keep("first turn", range(500), 10)

    assert kept.take(range(600), lambda _: False) == ("first turn", 500, True)
    assert list(kept) == []
