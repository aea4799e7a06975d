"""Growth by falling path probability: the rule of the adaptive strategy. Pure."""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from protocol.messages.plans import BestFirst
from protocol.speculation.evaluated_tree import EvaluatedTree, GrowthStep
from protocol.speculation.token_tree import Node

MAX_ALIVE = 2048
"""Nodes of one sequence, root included: bounds memory and the time a re-root takes."""
FLOOR = 1e-6
"""Path probability below which a node is not worth a forward."""
_LOG_FLOOR = math.log(FLOOR)
MOST_FORCED = 8
"""Tokens that must follow one another are told so many at a time."""
Forced: TypeAlias = Callable[[Node], int | None]
"""The one token that may follow a node, if there is only one."""


class BestFirstGrowth:
    """The `width` most probable open nodes a step, `fan` children each; what must follow them needs no step."""

    def __init__(self, evaluated: EvaluatedTree, plan: BestFirst, forced: Forced | None = None) -> None:
        self._evaluated = evaluated
        self._plan = plan
        self._forced = forced
        self._heap = [_entry(node) for node in evaluated.tree if evaluated.is_open(node)]
        heapq.heapify(self._heap)

    def choose(self) -> GrowthStep | None:
        """Takes the chosen nodes off the frontier: ask once, then evaluate them."""
        tree = self._evaluated.tree
        room = (MAX_ALIVE - len(tree)) // self._plan.fan
        least = tree.root.log_path + _LOG_FLOOR
        nodes: list[Node] = []
        while len(nodes) < min(self._plan.width, room) and self._heap and -self._heap[0][0] >= least:
            nodes.append(heapq.heappop(self._heap)[-1])
        return GrowthStep(nodes, self._plan.fan) if nodes else None

    def publish(self, fresh: Sequence[Node]) -> list[Node]:
        children = [child for node in fresh for child in self._evaluated.adopt(node, self._plan.fan)]
        if self._forced is not None:
            root = self._evaluated.tree.root
            likely = heapq.nlargest(self._plan.width, children, key=lambda child: child.log_path)
            for node in likely if root.children else [root]:
                children += self._chain(node, self._forced)
        for child in children:
            if self._evaluated.is_open(child):
                heapq.heappush(self._heap, _entry(child))
        return children

    def _chain(self, node: Node, forced: Forced) -> list[Node]:
        """New nodes for the tokens that must follow `node`."""
        chain: list[Node] = []
        while len(chain) < MOST_FORCED and self._evaluated.is_open(node):
            token = forced(node)
            if token is None or token in node.children:
                break
            node = self._evaluated.tree.add(node, token, 1.0)
            chain.append(node)
        return chain


def _entry(node: Node) -> tuple[float, int, int, Node]:
    """Parents before children that must follow them."""
    return (-node.log_path, node.depth, node.id, node)
