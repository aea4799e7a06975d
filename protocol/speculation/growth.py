"""Which nodes of a token tree to evaluate next and which children to publish. Pure: knows no engine."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, assert_never

from protocol.messages.base import NodeId
from protocol.messages.plans import BestFirst, Chain, FanOut, GrowthPlan
from protocol.speculation.best_first import BestFirstGrowth, Forced
from protocol.speculation.calibration import Calibration
from protocol.speculation.candidates import Candidates
from protocol.speculation.chains import ChainGrowth, FanOutGrowth
from protocol.speculation.evaluated_tree import EvaluatedTree, GrowthStep
from protocol.speculation.token_tree import Node, TokenTree


class TreeGrowth:
    """One sequence's tree under one plan: repeat `next_step`, evaluate it, `expand`. `advance` moves the root."""

    def __init__(
        self, tree: TokenTree, plan: GrowthPlan, horizon: int, calibration: Calibration, forced: Forced | None = None
    ) -> None:
        """`horizon`: the first absolute position whose node is never evaluated. `forced`: the forced token behind a
        node of this tree."""
        self.tree = tree
        self._evaluated = EvaluatedTree(tree, horizon, calibration)
        self._plan = plan
        self._forced = forced
        self._rule = _rule(plan, self._evaluated, forced)
        self._next: GrowthStep | None = None

    @property
    def candidates(self) -> Mapping[NodeId, Candidates]:
        """Of every evaluated node in the tree."""
        return self._evaluated.candidates

    def next_step(self) -> GrowthStep | None:
        """The nodes to evaluate next; None while the growth pauses. The same until `expand` or `advance`."""
        if self._next is None:
            self._next = self._rule.choose()
        return self._next

    def expand(self, step: GrowthStep, candidates: Sequence[Candidates]) -> list[Node]:
        """Take the engine's candidates of the step's nodes. Returns the new nodes, siblings together."""
        self._next = None
        self._evaluated.record(step.nodes, candidates)
        return self._rule.publish(step.nodes)

    def advance(self, tokens: Sequence[int], plan: GrowthPlan | None = None) -> list[Node]:
        """Move the root along `tokens`, under a new plan if one is given. Returns committed nodes, old root first."""
        committed = self._evaluated.advance(tokens)
        self._plan = plan or self._plan
        self._rule = _rule(self._plan, self._evaluated, self._forced)
        self._next = None
        return committed

    def extend(self, steps: int) -> None:
        """Take up to `steps` steps below the root, under a plan that pauses after some."""
        if isinstance(self._rule, BestFirstGrowth):
            self._rule.extend(steps)

    def publish(self) -> list[Node]:
        """After `advance`: new nodes of the plan that need no forward."""
        return self._rule.publish(())

    def surviving(self) -> Iterator[Node]:
        """All nodes below the root, parents before children, siblings together."""
        level = [self.tree.root]
        while level:
            level = [child for node in level for child in node.children.values()]
            yield from level


class _Rule(Protocol):
    """A plan applied to a tree; a new one is made whenever the root moves."""

    def choose(self) -> GrowthStep | None: ...

    def publish(self, evaluated: Sequence[Node]) -> list[Node]:
        """Add the plan's nodes to the tree, now that the nodes `evaluated` have candidates. Returns the new nodes."""
        ...


def _rule(plan: GrowthPlan, evaluated: EvaluatedTree, forced: Forced | None) -> _Rule:
    match plan:
        case BestFirst():
            return BestFirstGrowth(evaluated, plan, forced)
        case Chain():
            return ChainGrowth(evaluated, plan)
        case FanOut():
            return FanOutGrowth(evaluated, plan)
        case _:
            assert_never(plan)
