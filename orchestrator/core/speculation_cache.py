"""The speculation cache of one sequence: the token tree that the draft grows and the target walks down. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocol.messages.base import NodeId
from protocol.messages.plans import Distribution
from protocol.messages.worker import Grow
from protocol.speculation.token_tree import Node, TokenTree, node_id

_MAX_NODES = 1 << 13
"""Twice what any plan keeps. It bounds the memory, and the time of a commit, whatever a draft sends."""
_MAX_CHILDREN = 256
"""Children of one node: four times what any plan asks for. The search for the most probable path visits them all."""


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """What a verdict meant for the cache."""

    hit: bool
    """The new root already has children."""
    fan: int
    """Children of the last accepted node: the guesses of the bonus token."""
    guessed: bool
    """The bonus token was among them."""


class SpeculationCache:
    """Nodes keep their ids when the root moves, so that growth may arrive late, twice or out of order."""

    def __init__(self, root: NodeId, token: int, position: int) -> None:
        self.tree = TokenTree(root, token, position)
        self.orphans = 0
        """Nodes that arrived for a parent that is not, or no longer, in the tree."""
        self._distributions: dict[NodeId, Distribution] = {}

    @property
    def root(self) -> Node:
        return self.tree.root

    @property
    def empty(self) -> bool:
        """Nothing is known below the root."""
        return not self.root.children

    def merge(self, growth: Grow, believe: Callable[[float, int], float], vocabulary: int) -> int:
        """Add what a draft grew, as far as there is room, without tokens from `vocabulary` on.

        `believe` turns a draft's claim and a guess's rank among its siblings into a probability. Returns the number of
        new nodes.
        """
        before = len(self.tree)
        for parent_id, token, claimed in zip(growth.parents, growth.tokens, growth.probabilities, strict=True):
            parent = self.tree.get(parent_id)
            if parent is None:
                self.orphans += 1
            elif token < vocabulary and len(self.tree) < _MAX_NODES and len(parent.children) < _MAX_CHILDREN:
                self.tree.add(parent, token, claimed, believe(claimed, len(parent.children)))
        for distribution in growth.distributions:
            if distribution.node in self.tree:
                self._distributions[distribution.node] = distribution
        return len(self.tree) - before

    def loose_chain(self, leaf: Node, guesses: Sequence[tuple[int, float]]) -> list[Node]:
        """A chain of (token, believed probability) below `leaf`, outside the tree, since no draft grew it."""
        nodes: list[Node] = []
        parent = leaf
        for token, belief in guesses:
            log_path = parent.log_path + math.log(belief)
            parent = Node(node_id(parent.id, token), parent, token, belief, log_path, parent.depth + 1)
            nodes.append(parent)
        return nodes

    def chain(self, limit: int) -> list[Node]:
        """The first `limit` nodes of the draft's main chain."""
        nodes: list[Node] = []
        for node in self.tree.main_chain():
            if len(nodes) == limit:
                break
            nodes.append(node)
        return nodes

    def distributions(self, nodes: Sequence[Node]) -> tuple[Distribution, ...]:
        """The draft distributions that `nodes` were sampled from, where they are known."""
        parents = (node.parent.id for node in nodes if node.parent is not None)
        return tuple(self._distributions[parent] for parent in parents if parent in self._distributions)

    def advance(self, tokens: Sequence[int]) -> CommitOutcome:
        """Commit accepted tokens; the last one, the bonus, becomes the root."""
        tail = self.root
        for token in tokens[:-1]:
            tail = tail.children.get(token) or self.tree.add(tail, token, 1.0)
        fan, guessed = len(tail.children), tokens[-1] in tail.children
        self.tree.advance(tokens)
        self._distributions = {node: q for node, q in self._distributions.items() if node in self.tree}
        return CommitOutcome(hit=not self.empty, fan=fan, guessed=guessed)
