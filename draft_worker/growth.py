"""Which nodes of a token tree to evaluate next and which children to publish. Pure: knows no engine.

How many a step evaluates is the plan's: `orchestrator.core.policy` chooses it.

The adaptive strategy grows by falling path probability. In chains grow drafting in turns
with the target (sd) and the published speculation cache (ssd).
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, assert_never

from protocol.messages.base import MAX_NODES, NodeId
from protocol.messages.plans import BestFirst, Chain, FanOut, GrowthPlan
from protocol.speculation.token_tree import Calibration, Candidates, Node, TokenTree

_MAX_CHAIN_NODES = 4096
"""Nodes of one sequence. Growth pauses there, whatever the plan asks for."""
_CANDIDATES_PER_GUESS = 2
"""Candidates kept for each planned guess: the next plan may ask for more at a node evaluated under this one."""


class GrowthStep(NamedTuple):
    """Nodes for one forward, parents before children."""

    nodes: Sequence[Node]
    limit: int
    """Candidates of each node that the engine returns."""


class EvaluatedTree:
    """The tree holds published nodes. Candidates may become nodes later."""

    def __init__(self, tree: TokenTree, horizon: int, calibration: Calibration) -> None:
        """`horizon`: nodes at this absolute position and beyond are never evaluated. `calibration` corrects the draft's
        claims, and observes what the target commits."""
        self.tree = tree
        self._calibration = calibration
        self.candidates: dict[NodeId, Candidates] = {}
        self._horizon = horizon

    def is_open(self, node: Node) -> bool:
        """Whether the node can still be evaluated."""
        return node.id not in self.candidates and node.depth < self._horizon

    def record(self, nodes: Iterable[Node], candidates: Iterable[Candidates]) -> None:
        self.candidates.update((node.id, found) for node, found in zip(nodes, candidates, strict=True))

    def add_children(self, node: Node, count: int) -> list[Node]:
        """Add the first `count` candidates of an evaluated node as its children. Returns the new nodes."""
        found = self.candidates.get(node.id)
        if found is None:
            return []
        tokens, claims = found.tokens[:count], found.probabilities[:count]
        return self.tree.add_children(node, tokens, claims, self._calibration.of_siblings(claims))

    def advance(self, tokens: Sequence[int]) -> list[Node]:
        """Move the root along `tokens`. Returns the committed nodes, old root first."""
        self._observe(tokens)
        committed = self.tree.advance(tokens)
        self.candidates = {id: found for id, found in self.candidates.items() if self.tree.get(id) is not None}
        return committed

    def _observe(self, tokens: Sequence[int]) -> None:
        """Compare the candidates of the committed path's evaluated nodes with the committed tokens."""
        node: Node | None = self.tree.root
        for token in tokens:
            if node is None or node.id not in self.candidates:
                return
            found = self.candidates[node.id]
            for rank, (guess, probability) in enumerate(zip(found.tokens, found.probabilities, strict=True)):
                self._calibration.observe(probability, rank, guess == token)
            node = node.children.get(token)


class ChainGrowth:
    """The main chain below the root, one node a step, then a pause."""

    def __init__(self, evaluated: EvaluatedTree, plan: Chain) -> None:
        self._evaluated = evaluated
        self._depth = plan.depth

    def choose(self) -> GrowthStep | None:
        tip = _open_tip(self._evaluated, self._evaluated.tree.root, self._depth)
        return None if tip is None else GrowthStep([tip], limit=1)

    def publish(self, evaluated: Sequence[Node]) -> list[Node]:
        return [child for node in evaluated for child in self._evaluated.add_children(node, 1)]


class FanOutGrowth:
    """Saguaro's cache (arXiv 2603.03251, section 4): first the main chain with its last node, then
    `fan[k]` bonus guesses after k accepted tokens, then every guess's chain, one level a step."""

    def __init__(self, evaluated: EvaluatedTree, plan: FanOut) -> None:
        self._evaluated = evaluated
        self._plan = plan
        self._fan = plan.fan[: plan.depth + 1] + (0,) * (plan.depth + 1 - len(plan.fan))

    def choose(self) -> GrowthStep | None:
        if len(self._evaluated.tree) >= _MAX_CHAIN_NODES:
            return None
        tips = list(self._tips())[:MAX_NODES]
        if not tips:
            return None
        return GrowthStep(tips, _CANDIDATES_PER_GUESS * max(self._fan) + 1)

    def publish(self, evaluated: Sequence[Node]) -> list[Node]:
        """Chains first, then the bonus guesses, once the main chain has been evaluated to its end."""
        chain = self._chain()
        last = chain[self._plan.depth] if len(chain) > self._plan.depth else None
        published = [child for node in evaluated if node is not last for child in self._evaluated.add_children(node, 1)]
        chain = self._chain()
        if not any(self._evaluated.is_open(node) for node in chain):
            for position, node in enumerate(chain):
                chained = 1 if position < self._plan.depth else 0
                published += self._evaluated.add_children(node, chained + self._fan[position])
        return published

    def _tips(self) -> Iterator[Node]:
        """The open node of the main chain, else those of all guesses' chains."""
        chain = self._chain()
        tip = _open_tip(self._evaluated, chain[0], self._plan.depth + 1)
        if tip is not None:
            yield tip
            return
        for guess in _guesses(chain):
            tip = _open_tip(self._evaluated, guess, self._plan.depth)
            if tip is not None:
                yield tip

    def _chain(self) -> list[Node]:
        """The root and at most `depth` nodes of its main chain."""
        tree = self._evaluated.tree
        return [tree.root, *(node for node, _ in zip(tree.main_chain(), range(self._plan.depth), strict=False))]


def _guesses(chain: Sequence[Node]) -> Iterator[Node]:
    """Children of the chain's nodes that are not in the chain themselves."""
    for node, following in zip(chain, [*chain[1:], None], strict=True):
        for child in node.children.values():
            if child is not following:
                yield child


def _open_tip(evaluated: EvaluatedTree, start: Node, length: int) -> Node | None:
    """The first open node among `length` nodes of the chain from `start`."""
    node: Node | None = start
    for _ in range(length):
        if node is None or evaluated.is_open(node):
            return node
        node = node.main_child
    return None


MAX_TREE_NODES = 2048
"""Nodes of one sequence, root included. It bounds the memory and the time that a new root takes."""
MIN_PATH_PROBABILITY = 1e-6
"""A node with a lower path probability is not worth a forward, whatever the plan says."""
_MIN_LOG_PATH = math.log(MIN_PATH_PROBABILITY)
_MAX_FORCED_TOKENS = 8
"""Longest chain of forced tokens that one step adds at one node."""
Forced: TypeAlias = Callable[[Node], int | None]
"""The only token that may follow a node; None if several may."""


class BestFirstGrowth:
    """A step evaluates the `width` most probable open nodes, with `fan` children each. Forced tokens need no step."""

    def __init__(self, evaluated: EvaluatedTree, plan: BestFirst, forced: Forced | None = None) -> None:
        self._evaluated = evaluated
        self._plan = plan
        self._worthwhile = math.log(max(plan.least, MIN_PATH_PROBABILITY))
        self._forced = forced
        self._allowed = plan.steps
        """Steps that may still be taken below the root; None: any number."""
        self._taken = 0
        self._heap = [_entry(node) for node in evaluated.tree if evaluated.is_open(node)]
        heapq.heapify(self._heap)

    def choose(self) -> GrowthStep | None:
        """Removes the chosen nodes from the open ones: call it once, then evaluate them."""
        tree = self._evaluated.tree
        room = (MAX_TREE_NODES - len(tree)) // self._plan.fan
        if self._allowed is not None and self._taken >= self._allowed:
            return None
        if not self._heap or -self._heap[0][0] < tree.root.log_path + self._worthwhile:
            return None
        # A step takes hardly longer for more nodes, so the improbable ones fill its width, unless the target waits.
        least = tree.root.log_path + (_MIN_LOG_PATH if self._allowed is None else self._worthwhile)
        nodes: list[Node] = []
        while len(nodes) < min(self._plan.width, room) and self._heap and -self._heap[0][0] >= least:
            nodes.append(heapq.heappop(self._heap)[-1])
        self._taken += bool(nodes)
        return GrowthStep(nodes, self._plan.fan) if nodes else None

    def extend(self, steps: int) -> None:
        """Take up to `steps` steps below the root in all, unless the plan allows any number."""
        if self._allowed is not None:
            self._allowed = max(self._allowed, steps)

    def publish(self, evaluated: Sequence[Node]) -> list[Node]:
        children = [child for node in evaluated for child in self._evaluated.add_children(node, self._plan.fan)]
        if self._forced is not None:
            root = self._evaluated.tree.root
            best = heapq.nlargest(self._plan.width, children, key=lambda child: child.log_path)
            for node in best if root.children else [root]:
                children += self._chain(node, self._forced)
        for child in children:
            if self._evaluated.is_open(child):
                heapq.heappush(self._heap, _entry(child))
        return children

    def _chain(self, node: Node, forced: Forced) -> list[Node]:
        """New nodes for the forced tokens behind `node`."""
        chain: list[Node] = []
        while len(chain) < _MAX_FORCED_TOKENS and self._evaluated.is_open(node):
            token = forced(node)
            if token is None or token in node.children:
                break
            node = self._evaluated.tree.add(node, token, 1.0)
            chain.append(node)
        return chain


def _entry(node: Node) -> tuple[float, int, int, Node]:
    """Sorts parents before their forced children, which have the same path probability."""
    return (-node.log_path, node.depth, node.id, node)


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


_Rule: TypeAlias = BestFirstGrowth | ChainGrowth | FanOutGrowth
"""A plan applied to a tree; a new one is made whenever the root moves. `publish` adds the plan's nodes, now that the
nodes `evaluated` have candidates."""


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
