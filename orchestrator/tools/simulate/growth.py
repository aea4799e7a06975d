"""Which nodes a modelled draft evaluates next under each plan, and what it publishes. Pure.

The same rules as the draft worker's, which this process may not import; a test holds the two together.
"""

import heapq
import math
from collections.abc import Iterator, Sequence

from orchestrator.tools.simulate.language import Guess
from protocol.messages.base import MAX_NODES, NodeId
from protocol.messages.plans import BestFirst, Chain, FanOut, GrowthPlan
from protocol.speculation.calibration import Calibration
from protocol.speculation.token_tree import Node, TokenTree

_BEST_FIRST_ALIVE = 2048
_FAN_OUT_ALIVE = 4096
_LEAST = math.log(1e-6)
"""Log path probability below which a node is not worth a forward."""
_SPARE = 2
"""Candidates looked up for each one that a fan-out plans."""


class GrownTree:
    """A token tree together with the guesses behind its evaluated nodes; published ones are in the tree."""

    def __init__(self, tree: TokenTree, horizon: int, calibration: Calibration) -> None:
        """`horizon`: nodes at this absolute position and beyond are never evaluated. `calibration` says what
        claims are worth, and learns it from what is committed."""
        self.tree = tree
        self._calibration = calibration
        self.guesses: dict[NodeId, Sequence[Guess]] = {}
        self._horizon = horizon
        self._frontier = [_entry(node) for node in tree]
        """A heap of what was open when it was added."""

    def is_open(self, node: Node) -> bool:
        return node.id not in self.guesses and node.depth < self._horizon

    def advance(self, tokens: Sequence[int]) -> list[Node]:
        """Move the root; returns the newly committed nodes, old root first."""
        self._learn(tokens)
        committed = self.tree.advance(tokens)
        self.guesses = {id: found for id, found in self.guesses.items() if id in self.tree}
        self._frontier = [_entry(node) for node in self.tree if self.is_open(node)]
        heapq.heapify(self._frontier)
        return committed

    def adopt(self, node: Node, count: int) -> list[Node]:
        """Publish the first `count` guesses behind a node; returns those that are new."""
        best = enumerate(self.guesses.get(node.id, ())[:count])
        fresh = [
            self.tree.add(node, guess.token, guess.claim, self._calibration(guess.claim, rank))
            for rank, guess in best
            if guess.token not in node.children
        ]
        for child in fresh:
            heapq.heappush(self._frontier, _entry(child))
        return fresh

    def most_probable(self, count: int, least: float) -> list[Node]:
        """At most `count` open nodes of at least this log path probability, the best first."""
        best: list[tuple[float, int, Node]] = []
        while len(best) < count and self._frontier and -self._frontier[0][0] >= least:
            entry = heapq.heappop(self._frontier)
            if self.is_open(entry[2]):
                best.append(entry)
        for entry in best:
            heapq.heappush(self._frontier, entry)
        return [node for *_, node in best]

    def surviving(self) -> Iterator[Node]:
        """All nodes below the root, level by level."""
        level = [self.tree.root]
        while level:
            level = [child for node in level for child in node.children.values()]
            yield from level

    def _learn(self, tokens: Sequence[int]) -> None:
        node: Node | None = self.tree.root
        for token in tokens:
            if node is None or node.id not in self.guesses:
                return
            for rank, guess in enumerate(self.guesses[node.id]):
                self._calibration.observe(guess.claim, rank, guess.token == token)
            node = node.children.get(token)


def next_nodes(grown: GrownTree, plan: GrowthPlan) -> list[Node]:
    """What the next forward evaluates; none in a lull."""
    match plan:
        case BestFirst():
            return _most_probable(grown, plan)
        case Chain(depth):
            tip = _open_tip(grown, grown.tree.root, depth)
            return [] if tip is None else [tip]
        case FanOut():
            return _chain_tips(grown, plan)


def guesses_wanted(plan: GrowthPlan) -> int:
    """Of each node of a forward."""
    match plan:
        case BestFirst():
            return plan.fan
        case Chain():
            return 1
        case FanOut():
            return _SPARE * max(plan.fan) + 1


def publish(grown: GrownTree, plan: GrowthPlan, fresh: Sequence[Node]) -> list[Node]:
    """Add to the tree what the plan wants, now that `fresh` is evaluated; returns what is new."""
    match plan:
        case BestFirst():
            return [child for node in fresh for child in grown.adopt(node, plan.fan)]
        case Chain():
            return [child for node in fresh for child in grown.adopt(node, 1)]
        case FanOut():
            return _publish_fan_out(grown, plan, fresh)


def _most_probable(grown: GrownTree, plan: BestFirst) -> list[Node]:
    room = (_BEST_FIRST_ALIVE - len(grown.tree)) // plan.fan
    return grown.most_probable(min(plan.width, room), grown.tree.root.log_path + _LEAST)


def _entry(node: Node) -> tuple[float, int, Node]:
    return (-node.log_path, node.id, node)


def _chain_tips(grown: GrownTree, plan: FanOut) -> list[Node]:
    """The main chain's open end; once that is evaluated, the open end of every guess's chain."""
    if len(grown.tree) >= _FAN_OUT_ALIVE:
        return []
    chain = _chain(grown.tree, plan.depth)
    tip = _open_tip(grown, chain[0], plan.depth + 1)
    if tip is not None:
        return [tip]
    tips = (_open_tip(grown, guess, plan.depth) for guess in _beside(chain))
    return [tip for tip in tips if tip is not None][:MAX_NODES]


def _publish_fan_out(grown: GrownTree, plan: FanOut, fresh: Sequence[Node]) -> list[Node]:
    chain = _chain(grown.tree, plan.depth)
    last = chain[plan.depth] if len(chain) > plan.depth else None
    published = [child for node in fresh if node is not last for child in grown.adopt(node, 1)]
    chain = _chain(grown.tree, plan.depth)
    if not any(grown.is_open(node) for node in chain):
        for depth, node in enumerate(chain):
            bonus = plan.fan[depth] if depth < len(plan.fan) else 0
            published += grown.adopt(node, bonus + (depth < plan.depth))
    return published


def _chain(tree: TokenTree, depth: int) -> list[Node]:
    """The root and at most `depth` nodes of its main chain."""
    return [tree.root, *(node for node, _ in zip(tree.main_chain(), range(depth), strict=False))]


def _beside(chain: Sequence[Node]) -> Iterator[Node]:
    """Children of the chain's nodes that are not of the chain."""
    for node, following in zip(chain, [*chain[1:], None], strict=True):
        yield from (child for child in node.children.values() if child is not following)


def _open_tip(grown: GrownTree, start: Node, length: int) -> Node | None:
    """The first open node among `length` nodes of the main chain from `start`."""
    node: Node | None = start
    for _ in range(length):
        if node is None or grown.is_open(node):
            return node
        node = node.main_child
    return None
