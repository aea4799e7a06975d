"""Beside a target that verifies one path, `adaptive` sends the path with the highest expected rate."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.estimates import Estimates
from orchestrator.core.expected_rate import best_count, best_counts
from orchestrator.core.options import Options
from orchestrator.core.policy.adaptive import Adaptive, PathCandidates
from orchestrator.core.policy.decision import VerifyNodes
from protocol.messages.base import NodeId
from protocol.speculation.token_tree import Node, TokenTree, fits, flatten
from tests.support.request_views import guesses_behind, seen_request

ROOT, POSITION = NodeId(1), 5
PROBABILITIES = st.floats(0.01, 0.99)
GROWN = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 9), PROBABILITIES), max_size=14)
"""Nodes of a tree: a number that picks the parent, a token, its probability."""
LOOKUPS = st.lists(st.tuples(st.integers(0, 9), PROBABILITIES), max_size=4)
"""What prompt lookup guesses below the root."""
COSTS = st.lists(st.floats(0.01, 0.1), min_size=8, max_size=8)
"""Seconds of forwards over 1, 2, ... tokens: they may fall with the width."""


def tree(grown: Sequence[tuple[int, int, float]]) -> TokenTree:
    made = TokenTree(ROOT, 3, POSITION)
    for pick, token, probability in grown:
        nodes = list(made)
        made.add(nodes[pick % len(nodes)], token, probability)
    return made


def view(made: TokenTree, costs: Sequence[float], lookup: Sequence[tuple[int, float]] = ()) -> Any:
    """Of a request whose draft owes no growth. Prompt lookup guesses below the root alone."""
    estimates = Estimates()
    estimates.beside_draft.expect([(width, seconds) for width, seconds in enumerate(costs, start=1)])

    def guesses(leaf: Node) -> list[Node]:
        return guesses_behind(leaf, lookup) if leaf is made.root else []

    return seen_request(made, estimates, guesses_behind=guesses, level="chain")


def decided(options: Options, *views: Any) -> list[list[Node]]:
    decisions = Adaptive(options).decide(views, 0.0)
    assert all(isinstance(decision, VerifyNodes) for decision in decisions)
    return [decision.nodes for decision in decisions if isinstance(decision, VerifyNodes)]


def paths(made: TokenTree, limit: int) -> Iterator[list[Node]]:
    """Every path below the root of at most so many nodes, the empty one too."""
    for end in made:
        path: list[Node] = []
        node: Node | None = end
        while node is not None and node is not made.root:
            path.append(node)
            node = node.parent
        if len(path) <= limit:
            yield path[::-1]


def gain(path: Sequence[Node]) -> float:
    """Expected tokens that the path adds to the root's."""
    return sum(itertools.accumulate((node.probability for node in path), lambda above, own: above * own))


@given(grown=GROWN, costs=COSTS, lookup=LOOKUPS, limit=st.integers(1, 7))
def test_no_path_has_a_higher_expected_rate(grown, costs, lookup, limit):
    made = tree(grown)
    shown = view(made, costs, lookup)

    (chosen,) = decided(Options(max_verify=limit), shown)

    guessed = shown.guesses_behind(made.root)[:limit]
    others = [*paths(made, limit), *(guessed[:length] for length in range(len(guessed) + 1))]
    rates = [(1.0 + gain(path)) / costs[len(path)] for path in others]
    assert fits(flatten(made.root, chosen)[1], "chain")
    assert (1.0 + gain(chosen)) / costs[len(chosen)] == pytest.approx(max(rates))


@given(trees=st.lists(GROWN, min_size=2, max_size=3), token=st.floats(0.0, 0.03), limit=st.integers(1, 4))
def test_no_choice_of_paths_for_all_requests_has_a_higher_expected_rate(trees, token, limit):
    """Where each token of a forward costs the same."""
    made = [tree(grown[:6]) for grown in trees]
    costs = [0.02 + token * width for width in range(1, 32)]

    chosen = decided(Options(max_verify=limit, lookup="off"), *(view(one, costs) for one in made))

    def rate(choice: Sequence[Sequence[Node]]) -> float:
        return (len(choice) + sum(map(gain, choice))) / costs[len(choice) - 1 + sum(map(len, choice))]

    assert rate(chosen) == pytest.approx(max(map(rate, itertools.product(*(paths(one, limit) for one in made)))))


@given(
    gains=st.lists(st.lists(st.floats(-0.5, 1.0), max_size=4), min_size=1, max_size=3),
    token=st.floats(0.0, 1.0),
    overhead=st.floats(0.0, 1.0),
)
def test_joint_counts_are_the_best_whether_gains_fall_or_rise(gains, token, overhead):
    def cost(width: int) -> float:
        return 1.0 + token * width

    def rate(counts: Sequence[int]) -> float:
        expected = len(gains) + sum(sum(own[:count]) for own, count in zip(gains, counts, strict=True))
        return expected / (cost(len(gains) + sum(counts)) + overhead)

    counts, found = best_counts(gains, cost, overhead)

    assert found.rate == pytest.approx(max(map(rate, itertools.product(*(range(len(own) + 1) for own in gains)))))
    assert rate(counts) == pytest.approx(found.rate)
    assert found.surplus(found.rate) == pytest.approx(0.0)
    assert best_counts(gains, cost, overhead, usual=found.rate)[1].rate == pytest.approx(found.rate)
    assert len(gains) > 1 or best_count(gains[0], cost, overhead).rate == pytest.approx(found.rate)


@given(grown=GROWN, acceptance=PROBABILITIES, limit=st.integers(1, 7), width=st.integers(1, 16))
def test_growth_is_expected_to_give_each_open_node_its_best_child(grown, acceptance, limit, width):
    made = tree(grown)
    expected = list(itertools.accumulate(_gains_after_growth(made, limit, width, acceptance), initial=0.0))

    nodes = list(made) if made.root.children else [made.root]
    leaves = sorted((node for node in nodes if not node.children), key=lambda node: (-node.log_path, node.id))
    for leaf in leaves[:width]:
        made.add(leaf, 99, acceptance)
    best = [max(gain(path) for path in paths(made, limit) if len(path) == length) for length in range(len(expected))]
    assert expected == pytest.approx(best)
    assert not any(len(path) == len(expected) for path in paths(made, limit))


def _gains_after_growth(made: TokenTree, limit: int, width: int, acceptance: float) -> list[float]:
    found = PathCandidates(view(made, [0.1]), limit, lookup=False, searched=100)
    return next(found.gains_after_growth(width, [acceptance, 0.5 * acceptance]))


def test_prompt_lookup_continues_the_drafts_path():
    made = TokenTree(ROOT, 3, POSITION)
    end = made.add(made.add(made.root, 1, 0.9), 1, 0.9)
    shown = view(made, [0.02 + 0.001 * width for width in range(1, 20)])
    shown.guesses_behind = lambda leaf: guesses_behind(leaf, [(7, 0.9)] if leaf is end else [])

    (chosen,) = decided(Options(), shown)

    assert [node.token for node in chosen] == [1, 1, 7]
    assert math.exp(chosen[-1].log_path) == pytest.approx(0.9**3)
