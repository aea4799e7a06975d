"""Growth in chains: in turns with the target (sd), and the published speculation cache (ssd). Pure."""

from collections.abc import Iterator, Sequence

from protocol.messages.base import MAX_NODES
from protocol.messages.plans import Chain, FanOut
from protocol.speculation.evaluated_tree import EvaluatedTree, GrowthStep
from protocol.speculation.token_tree import Node

MAX_TREE_NODES = 4096
"""Nodes of one sequence. Growth pauses there, whatever the plan asks for."""
_CANDIDATES_PER_GUESS = 2
"""Candidates kept for each planned guess: the next plan may ask for more at a node evaluated under this one."""


class ChainGrowth:
    """The main chain below the root, one node a step, then a pause."""

    def __init__(self, evaluated: EvaluatedTree, plan: Chain) -> None:
        self._evaluated = evaluated
        self._depth = plan.depth

    def choose(self) -> GrowthStep | None:
        tip = _open_tip(self._evaluated, self._evaluated.tree.root, self._depth)
        return None if tip is None else GrowthStep([tip[1]], limit=1)

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
        if len(self._evaluated.tree) >= MAX_TREE_NODES:
            return None
        tips = list(self._tips())[:MAX_NODES]
        if not tips:
            return None
        fans = [self._fan[position] for position, _ in tips] if self._plan.saguaro < 1.0 else ()
        return GrowthStep(
            [node for _, node in tips], _CANDIDATES_PER_GUESS * max(self._fan) + 1, self._plan.saguaro, fans
        )

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

    def _tips(self) -> Iterator[tuple[int, Node]]:
        """The open node of the main chain, else those of all guesses' chains, each with its position in its chain."""
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


def _open_tip(evaluated: EvaluatedTree, start: Node, length: int) -> tuple[int, Node] | None:
    """The first open node among `length` nodes of the chain from `start`, with its position in it."""
    node: Node | None = start
    for position in range(length):
        if node is None:
            return None
        if evaluated.is_open(node):
            return position, node
        node = node.main_child
    return None
