"""The token tree, a prefix tree of guesses behind the last committed token, and how far claims are believed. Pure."""

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.messages.base import Level, NodeId


class Candidates(NamedTuple):
    """An engine's result for one evaluated node: tokens that may follow it by falling probability, which is
    conditional on the node."""

    tokens: Sequence[int]
    probabilities: Sequence[float]


_MASK = (1 << 63) - 1


def node_id(parent: NodeId, token: int) -> NodeId:
    """63-bit content address of the path `parent` + `token`: the same path has the same id in every process.

    A multiply-xorshift mix after splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    mixed = (parent * 0x9E3779B97F4A7C15 + token * 0xBF58476D1CE4E5B9 + 1) & _MASK
    mixed ^= mixed >> 30
    mixed = (mixed * 0x94D049BB133111EB) & _MASK
    return NodeId(mixed ^ (mixed >> 31))


@dataclass(slots=True, eq=False)
class Node:
    """One token on one path. The first child is the main one: the draft's own next token."""

    id: NodeId
    parent: "Node | None"
    token: int
    probability: float
    """Conditional on the parent, as its draft claims."""
    log_path: float
    """Sum of believed log probabilities since the sequence began. Only differences have a meaning."""
    depth: int
    """Absolute position in the sequence."""
    children: "dict[int, Node]" = field(default_factory=dict)

    @property
    def main_child(self) -> "Node | None":
        return next(iter(self.children.values()), None)

    def guess(self, token: int, probability: float, belief: float) -> "Node":
        """A node behind this one that is not among its children. `belief` is its part of the path probability."""
        log_path = self.log_path + math.log(belief)
        return Node(node_id(self.id, token), self, token, probability, log_path, self.depth + 1)


class TokenTree:
    """Nodes below a root, which moves down as tokens are committed."""

    def __init__(self, root: NodeId, token: int, position: int) -> None:
        self.root = Node(root, None, token, 1.0, 0.0, position)
        self._nodes: dict[NodeId, Node] = {root: self.root}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def get(self, id: NodeId) -> Node | None:
        return self._nodes.get(id)

    def __contains__(self, id: NodeId) -> bool:
        return id in self._nodes

    def add(self, parent: Node, token: int, probability: float, belief: float | None = None) -> Node:
        """The child of `parent` with this token; one that exists is returned as it is.

        `belief` replaces the claimed `probability` in the path probability.
        """
        child = parent.children.get(token)
        if child is None:
            child = parent.guess(token, probability, max(probability if belief is None else belief, 1e-9))
            parent.children[token] = child
            self._nodes[child.id] = child
        return child

    def add_children(
        self, parent: Node, tokens: Sequence[int], probabilities: Sequence[float], beliefs: Sequence[float]
    ) -> list[Node]:
        """The children of `parent` with these tokens, as of `add`, less those that exist. A step of growth adds
        hundreds, so nothing is called for each but what it needs."""
        children, nodes, log = parent.children, self._nodes, math.log
        id, log_path, depth = parent.id, parent.log_path, parent.depth + 1
        added: list[Node] = []
        for token, probability, belief in zip(tokens, probabilities, beliefs, strict=True):
            if token not in children:
                child = Node(node_id(id, token), parent, token, probability, log_path + log(belief), depth)
                children[token] = nodes[child.id] = child
                added.append(child)
        return added

    def path_probability(self, node: Node) -> float:
        """Probability of reaching `node` from the root, in [0, 1]."""
        return math.exp(min(0.0, node.log_path - self.root.log_path))

    def path_probabilities(self, nodes: Sequence[Node]) -> list[float]:
        """Of each of `nodes`, which lie below the root; guesses behind nodes of the tree too."""
        root, exp = self.root.log_path, math.exp
        return [exp(node.log_path - root) for node in nodes]

    def advance(self, tokens: Sequence[int]) -> list[Node]:
        """`move_root`, then `prune`. Returns the newly committed nodes, old root first."""
        committed = self.move_root(tokens)
        self.prune()
        return committed

    def move_root(self, tokens: Sequence[int]) -> list[Node]:
        """Commit the root and `tokens` but the last, which becomes the new root. Missing nodes are created.

        Returns the newly committed nodes, old root first. Nodes that are not below the new root stay in the tree until
        `prune`.
        """
        committed: list[Node] = []
        node = self.root
        for token in tokens:
            committed.append(node)
            node = node.children.get(token) or self.add(node, token, 1.0)
        node.parent = None
        self.root = node
        return committed

    def prune(self) -> None:
        """Drop all nodes that are not below the root. Dropped and committed nodes lose their `parent`."""
        surviving = {node.id: node for node in _subtree(self.root)}
        for id, dropped in self._nodes.items():
            if id not in surviving:
                # Workers run without garbage collection: a cycle of parent and child would never be freed.
                dropped.parent = None
        self._nodes = surviving

    def best(self) -> Iterator[Node]:
        """Nodes below the root by falling path probability, each after its parent."""
        heap = [(-child.log_path, child.id, child) for child in self.root.children.values()]
        heapq.heapify(heap)
        while heap:
            node = heapq.heappop(heap)[2]
            yield node
            for child in node.children.values():
                heapq.heappush(heap, (-child.log_path, child.id, child))

    def main_chain(self) -> Iterator[Node]:
        """The main child of the root, its main child, and so on."""
        node = self.root.main_child
        while node is not None:
            yield node
            node = node.main_child


def flatten(root: Node, nodes: Sequence[Node]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and parent indices of root + nodes, entry 0 the root. Parents must come first."""
    index = {root.id: 0}
    parents = [-1]
    for position, node in enumerate(nodes, start=1):
        assert node.parent is not None
        parents.append(index[node.parent.id])
        index[node.id] = position
    return (root.token, *(node.token for node in nodes)), tuple(parents)


def fits(parents: tuple[int, ...], level: Level) -> bool:
    """Whether a model of this level evaluates a flattened tree with these parents in one forward."""
    return level == "tree" or len(parents) == 1 or (level == "chain" and parents[1:] == tuple(range(len(parents) - 1)))


def end_of_path(tokens: Sequence[int], parents: Sequence[int], path: Sequence[int]) -> int:
    """The entry of a flattened tree at which `path`, tokens from below the root, ends; 0, the root, if it is empty."""
    end = depth = 0
    for entry, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if depth < len(path) and parent == end and token == path[depth]:
            end, depth = entry, depth + 1
    return end


def _subtree(root: Node) -> Iterator[Node]:
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


# How far a draft's claims are believed ------------------------------------------------------------

_BINS = 16
_SPAN = 6.0
"""Bins cover log odds from -6 to 6."""
_BOUNDS = [1.0 / (1.0 + math.exp(_SPAN - 2 * _SPAN * bin / _BINS)) for bin in range(1, _BINS)]
"""The claims at which the bins behind the first begin."""
_RANKS = 4
"""The first three guesses at a node are measured apart, all further ones together."""
_PRIOR_WEIGHT = 16.0
_SHARE_WEIGHT = 32.0
_DECAY = 0.998


class Calibration:
    """Believed probabilities of guesses by their rank among their siblings and the draft's own claim.

    A draft that is right nine times of ten may claim 0.6, and then its second guess is hardly ever right. Bins are
    equal steps of the log odds. Each begins with a few pseudo-observations of the claim, corrected by all claims of
    this rank: a draft that overrates itself does so in every bin. If fewer came true than were claimed, the claim
    shrinks by that share; if more, what it lacks to 1 does.
    """

    def __init__(self, true: float = 1.0) -> None:
        """`true`: share of the claims that is believed to come true before any did."""
        self._trials = [[0.0] * _BINS for _ in range(_RANKS)]
        self._hits = [[0.0] * _BINS for _ in range(_RANKS)]
        self._claimed = [[_SHARE_WEIGHT, _SHARE_WEIGHT] for _ in range(_RANKS)]
        """How many were to be wrong and right, by the claims."""
        self._came = [[(2.0 - true) * _SHARE_WEIGHT, true * _SHARE_WEIGHT] for _ in range(_RANKS)]
        """How many were."""

    def __call__(self, claimed: float, rank: int) -> float:
        """The believed probability, strictly inside (0, 1). Rank 0 is the draft's first guess."""
        row, bin = min(rank, _RANKS - 1), bisect_right(_BOUNDS, claimed)
        (wrong, right), (wrong_claimed, right_claimed) = self._came[row], self._claimed[row]
        overrated = right * wrong_claimed <= right_claimed * wrong
        prior = claimed * right / right_claimed if overrated else 1.0 - (1.0 - claimed) * wrong / wrong_claimed
        share = (self._hits[row][bin] + _PRIOR_WEIGHT * prior) / (self._trials[row][bin] + _PRIOR_WEIGHT)
        return min(max(share, 1e-9), 1.0 - 1e-9)

    def of_siblings(self, claims: Sequence[float]) -> list[float]:
        """The believed probability of each guess at a node, the draft's first one first."""
        return [self(claimed, rank) for rank, claimed in enumerate(claims)]

    def observe(self, claimed: float, rank: int, right: bool) -> None:
        row, bin = min(rank, _RANKS - 1), bisect_right(_BOUNDS, claimed)
        self._trials[row][bin] = _DECAY * self._trials[row][bin] + 1.0
        self._hits[row][bin] = _DECAY * self._hits[row][bin] + right
        for counts, share in ((self._claimed[row], claimed), (self._came[row], float(right))):
            counts[:] = _DECAY * counts[0] + 1.0 - share, _DECAY * counts[1] + share
