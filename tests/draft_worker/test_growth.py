"""Laws of growth: evaluated nodes, their order, and published nodes, under every plan."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from draft_worker.growth import MIN_PATH_PROBABILITY, TreeGrowth
from protocol.messages.base import NodeId
from protocol.messages.plans import BestFirst, Chain, FanOut, GrowthPlan
from protocol.speculation.token_tree import Calibration, Candidates, Node, TokenTree
from tests.support.fake_draft import oracle

plans = some.one_of(
    some.builds(BestFirst, width=some.integers(1, 8), fan=some.integers(1, 4)),
    some.builds(Chain, depth=some.integers(1, 6)),
    some.integers(1, 4).flatmap(
        lambda depth: some.builds(FanOut, depth=some.just(depth), fan=some.tuples(*[some.integers(0, 3)] * (depth + 1)))
    ),
)


class Grower:
    """A growth driven by the oracle, with a record of its steps."""

    def __init__(self, plan: GrowthPlan, horizon: int = 1000, forcing: bool = False) -> None:
        """`forcing`: two of three nodes have only one possible token."""
        self.calibration = Calibration()
        forced = (lambda node: node.id % 50 if node.id % 3 else None) if forcing else None
        self.growth = TreeGrowth(TokenTree(NodeId(1), 0, 20), plan, horizon, self.calibration, forced)
        self.steps: list[list[Node]] = []
        self.published: list[Node] = []

    @property
    def tree(self) -> TokenTree:
        return self.growth.tree

    def step(self) -> bool:
        step = self.growth.next_step()
        if step is None:
            return False
        self.steps.append(list(step.nodes))
        answers = [oracle((node.id,), step.limit) for node in step.nodes]
        self.published += self.growth.expand(step, answers)
        return True

    def answered(self, *candidates: tuple[int, float]) -> list[int] | None:
        """One step with these candidates behind each node; the tokens of the next step, None if it pauses."""
        step = self.growth.next_step()
        assert step is not None
        found = Candidates([token for token, _ in candidates], [chance for _, chance in candidates])
        self.growth.expand(step, [found] * len(step.nodes))
        following = self.growth.next_step()
        return None if following is None else [node.token for node in following.nodes]

    def rest(self) -> "Grower":
        for _ in range(1000):
            if not self.step():
                return self
        pytest.fail("growth never rests")

    def advance(self, tokens: list[int], plan: GrowthPlan | None = None) -> None:
        self.growth.advance(tokens, plan)
        self.published += self.growth.publish()


def below(root: Node, node: Node) -> int:
    return node.depth - root.depth


def chain_from(node: Node | None) -> list[Node]:
    nodes = []
    while node is not None:
        nodes.append(node)
        node = node.main_child
    return nodes


def walk(grower: Grower, seed: int, moves: int = 12) -> None:
    """Steps and re-roots in random order: along the tree, off the tree, or past it."""
    source = random.Random(seed)
    for _ in range(moves):
        for _ in range(source.randrange(4)):
            grower.step()
        tokens, node = [], grower.tree.root
        for _ in range(source.randint(1, 3)):
            choices = [*node.children] if node is not None else []
            token = source.choice(choices) if choices and source.random() < 0.8 else source.randrange(50)
            node = node.children.get(token) if node is not None else None
            tokens.append(token)
        grower.advance(tokens)


@given(plans, some.integers(0, 999), some.booleans())
@settings(max_examples=60)
def test_every_node_is_evaluated_once_and_behind_its_parent(plan: GrowthPlan, seed: int, forcing: bool):
    grower, source, known = Grower(plan, forcing=forcing), random.Random(seed), set[int]()
    for _ in range(30):
        root = grower.tree.root
        if grower.growth.next_step() is None or source.random() < 0.2:
            grower.advance([source.choice([*root.children, source.randrange(50)])])
            continue
        grower.step()
        for node in grower.steps[-1]:
            assert node.id not in known
            assert node is root or (node.parent is not None and node.parent.id in known)
            known.add(node.id)

    assert known


@given(plans, some.integers(0, 999), some.booleans())
@settings(max_examples=60)
def test_published_nodes_give_the_same_tree_in_the_orchestrator(plan: GrowthPlan, seed: int, forcing: bool):
    grower = Grower(plan, forcing=forcing)
    for _ in range(12):
        grower.step()
    elsewhere = TokenTree(NodeId(1), 0, 20)
    for parent, token, probability, id in [
        (node.parent.id, node.token, node.probability, node.id) for node in grower.published if node.parent
    ]:
        into = elsewhere.get(parent)
        assert into is not None, "a parent is published before its children"
        assert elsewhere.add(into, token, probability).id == id

    assert {node.id for node in elsewhere} == {node.id for node in grower.tree}


@given(plans, some.integers(0, 999))
@settings(max_examples=60)
def test_the_root_is_evaluated_first_wherever_it_moves(plan: GrowthPlan, seed: int):
    grower = Grower(plan)
    walk(grower, seed)
    grower.advance([49, 49])
    assert grower.step()

    assert grower.steps[-1] == [grower.tree.root]


def test_best_first_takes_the_most_probable_open_nodes():
    grower = Grower(BestFirst(width=4, fan=3))
    for _ in range(10):
        evaluated = {node.id for step in grower.steps for node in step}
        open_nodes = [node for node in grower.tree if node.id not in evaluated]
        best = sorted(open_nodes, key=lambda node: -node.log_path)[:4]
        grower.step()
        assert [node.id for node in grower.steps[-1]] == [node.id for node in best]


@pytest.mark.parametrize(
    ("least", "chances", "evaluated"),
    [
        (0.0, (0.4, 0.2), [1, 2]),
        (0.3, (0.4, 0.2), [1, 2]),
        (0.5, (0.4, 0.2), None),
        (0.0, (MIN_PATH_PROBABILITY / 2, MIN_PATH_PROBABILITY / 4), None),
        (0.0, (), None),
    ],
)
def test_best_first_pauses_when_no_node_is_probable_enough(
    least: float, chances: tuple[float, ...], evaluated: list[int] | None
):
    grower = Grower(BestFirst(width=2, fan=2, least=least))

    assert grower.answered(*enumerate(chances, start=1)) == evaluated


@pytest.mark.parametrize(("steps", "evaluated"), [(None, [1, 2]), (2, [1])])
def test_best_first_fills_its_width_with_improbable_nodes_unless_the_target_waits(steps, evaluated: list[int]):
    grower = Grower(BestFirst(width=2, fan=2, least=0.3, steps=steps))

    assert grower.answered(*enumerate((0.4, 0.2), start=1)) == evaluated


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_a_chain_stops_at_its_depth(depth: int):
    grower = Grower(Chain(depth)).rest()

    assert [below(grower.tree.root, node) for node in grower.published] == list(range(1, depth + 1))
    assert [len(step) for step in grower.steps] == [1] * depth


def guesses_at(chain: list[Node]) -> list[list[Node]]:
    """Children of each chain node that are not of the chain."""
    following = [*chain[1:], None]
    return [
        [child for child in node.children.values() if child is not after]
        for node, after in zip(chain, following, strict=True)
    ]


fans = some.integers(1, 4).flatmap(lambda depth: some.tuples(*[some.integers(0, 3)] * (depth + 1)))


@given(fans)
@settings(max_examples=40)
def test_fan_out_publishes_as_many_guesses_as_planned_each_with_its_chain(fan: tuple[int, ...]):
    depth = len(fan) - 1
    grower = Grower(FanOut(depth=depth, fan=fan)).rest()
    chain = chain_from(grower.tree.root)[: depth + 1]
    guesses = guesses_at(chain)

    assert tuple(map(len, guesses)) == fan
    for at_position in guesses:
        for guess in at_position:
            assert len(chain_from(guess)) == 1 + depth
    assert len(grower.tree) == 1 + depth + sum(fan) * (1 + depth)
    # One forward a level.
    levels = [sum(fan)] * depth if sum(fan) else []
    assert [len(step) for step in grower.steps] == [1] * (depth + 1) + levels


def test_fan_out_needs_one_forward_before_guessing_again_after_a_hit():
    plan = FanOut(depth=3, fan=(1, 1, 1, 2))
    grower = Grower(plan).rest()
    chain = chain_from(grower.tree.root)[:4]
    hit = guesses_at(chain)[1][0]
    steps = len(grower.steps)
    grower.advance([chain[1].token, hit.token])

    assert grower.tree.root is hit
    grower.step()
    root_chain = chain_from(hit)[:4]
    assert grower.steps[steps] == [root_chain[3]]
    assert list(map(len, guesses_at(root_chain))) == [1, 1, 1, 2]


@given(plans)
@settings(max_examples=40)
def test_nothing_is_evaluated_at_the_horizon_or_beyond(plan: GrowthPlan):
    grower = Grower(plan, horizon=23).rest()

    assert all(node.depth < 23 for step in grower.steps for node in step)
    assert grower.steps


@given(plans, plans, some.integers(0, 999))
@settings(max_examples=60)
def test_a_plan_can_be_replaced_at_any_re_root(first: GrowthPlan, second: GrowthPlan, seed: int):
    grower = Grower(first)
    walk(grower, seed, moves=4)
    grower.advance([49, 49], second)
    fresh = Grower(second)
    root = TokenTree(grower.tree.root.id, 49, grower.tree.root.depth)
    fresh.growth = TreeGrowth(root, second, 1000, grower.calibration)
    begin = len(grower.steps)
    for _ in range(10):
        assert grower.step() == fresh.step()

    assert [[node.id for node in step] for step in grower.steps[begin:]] == [
        [node.id for node in step] for step in fresh.steps
    ]


def test_growth_follows_the_calibrated_probabilities():
    """A draft whose second candidate is always accepted grows below it first."""
    grower = Grower(BestFirst(width=1, fan=2))
    for _ in range(30):
        grower.answered((1, 0.6), (2, 0.4))
        grower.growth.advance([2])

    assert grower.answered((1, 0.6), (2, 0.4)) == [2]


def test_growth_in_turns_takes_the_steps_that_it_is_asked_for():
    grower = Grower(BestFirst(width=2, fan=2, steps=0))
    assert not grower.step()

    grower.growth.extend(2)
    assert [grower.step() for _ in range(3)] == [True, True, False]
    # Requests may be repeated, and none takes back an earlier one.
    grower.growth.extend(2)
    grower.growth.extend(1)
    assert not grower.step()

    grower.growth.advance([next(iter(grower.tree.root.children))])
    assert not grower.step()
