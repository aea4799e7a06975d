"""The tree equals a plain list of sequences, stores common prefixes once, and keeps no removed tokens."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from protocol.kv.prefix_index import PrefixIndex

TOKENS = st.lists(st.integers(0, 2), max_size=9)
NAMES = st.sampled_from("abcdef")


def shared(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Tree(RuleBasedStateMachine):
    """Few tokens and few names, so that sequences often share prefixes."""

    def __init__(self):
        super().__init__()
        self.tree: PrefixIndex[str] = PrefixIndex()
        self.held: dict[str, list[int]] = {}

    @rule(name=NAMES, tokens=TOKENS)
    def extend(self, name, tokens):
        self.tree.extend(name, tokens)
        self.held[name] = self.held.get(name, []) + tokens

    @rule(name=NAMES)
    def remove(self, name):
        if name in self.held:
            self.tree.remove(name)
            del self.held[name]

    @rule(tokens=TOKENS)
    def longest(self, tokens):
        found = self.tree.longest(tokens)

        best = max((shared(held, tokens) for held in self.held.values()), default=0)
        assert found.tokens == best
        assert sorted(found.names) == sorted(
            name for name, held in self.held.items() if best and shared(held, tokens) == best
        )

    @rule(tokens=TOKENS)
    def begins(self, tokens):
        for name, held in self.held.items():
            assert self.tree.begins(name, tokens) == (tokens[: len(held)] == held)

    @invariant()
    def covered_sequences_are_prefixes_of_others(self):
        for name, held in self.held.items():
            others = [other for key, other in self.held.items() if key != name]
            assert self.tree.covered(name) == any(other[: len(held)] == held for other in others)

    @invariant()
    def common_prefixes_are_stored_once_and_removed_sequences_not_at_all(self):
        prefixes = {tuple(held[:end]) for held in self.held.values() for end in range(1, len(held) + 1)}
        assert self.tree.stored == len(prefixes)
        assert all((name in self.tree) == (name in self.held) for name in "abcdef")


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=30, derandomize=True)
