"""The guesses of one request that the target can verify, at its level: what each node adds, and which nodes. Pure."""

from collections.abc import Iterable, Sequence
from heapq import merge
from itertools import islice, pairwise
from typing import Protocol

from orchestrator.core.policy.decision import SequenceView
from orchestrator.core.policy.expected_rate import with_growth
from protocol.speculation.token_tree import Node

_SEARCHED = 8
"""Nodes that are searched for the best paths, for each node of the longest path, in all trees of a forward: the more
requests share it, the shorter are the paths that are worth their cost."""


class Candidates(Protocol):
    """Of one request, for one decision."""

    gains: list[float]
    """Expected tokens that each further node adds, guesses by prompt lookup included: n nodes yield the sum of the
    first n."""
    open: list[float]
    """Path probabilities of the nodes that the draft's next growth step may give children, falling; that of the root if
    the draft has grown nothing."""

    def nodes(self, count: int) -> list[Node]:
        """The best `count` nodes, parents first."""
        ...

    def gains_after_growth(self, width: int, shares: Sequence[float], steps: int = 1) -> list[float]:
        """`gains` of the draft's guesses after `steps` steps, each of which gives the `width` most probable open nodes
        children that are accepted with the probabilities `shares`."""
        ...


def candidates(view: SequenceView, limit: int, lookup: bool, sharing: int) -> Candidates:
    """At most `limit` nodes, with guesses by prompt lookup if `lookup`, of one of `sharing` requests."""
    if view.level == "tree":
        return TreeCandidates(view, limit, lookup)
    return PathCandidates(view, limit, lookup, max(limit, _SEARCHED * limit // sharing))


class TreeCandidates:
    """Any tree can be verified, so the best nodes are the most probable ones."""

    def __init__(self, view: SequenceView, limit: int, lookup: bool) -> None:
        self._limit = limit
        self._nodes = drafted = _most_probable(view, limit)
        self.gains = self._drafted = view.path_probabilities(drafted)
        leaves = [path for node, path in zip(drafted, self._drafted, strict=True) if not node.children]
        self.open = leaves if view.tree.root.children else [1.0]
        if lookup and (guesses := self._guesses(view)):
            self._nodes = list(merge(drafted, guesses, key=lambda node: -node.log_path))[:limit]
            self.gains = view.path_probabilities(self._nodes)

    def nodes(self, count: int) -> list[Node]:
        return self._nodes[:count]

    def gains_after_growth(self, width: int, shares: Sequence[float], steps: int = 1) -> list[float]:
        found, open = self._drafted, self.open
        for _ in range(steps):
            found = with_growth(found, open[:width], shares)[: self._limit]
            open = with_growth(open[width:], open[:width], shares)
        return found

    def _guesses(self, view: SequenceView) -> list[Node]:
        """Guesses by prompt lookup behind the most probable leaf."""
        leaf = next((node for node in self._nodes or [view.tree.root] if not node.children), None)
        return [] if leaf is None else view.lookup_chain(leaf)


class PathCandidates:
    """One path can be verified: the best one of n nodes is that with the highest sum of path probabilities.

    The best paths of two lengths may differ, so `gains` need neither fall nor be positive.
    """

    def __init__(self, view: SequenceView, limit: int, lookup: bool, searched: int) -> None:
        """`searched`: the number of most probable nodes that paths are made of."""
        root = view.tree.root
        drafted = _most_probable(view, searched)
        probabilities = view.path_probabilities(drafted)
        leaves = [each for each in zip(drafted, probabilities, strict=True) if not each[0].children]
        self._open = leaves if root.children else [(root, 1.0)]
        self.open = [path for _, path in self._open]
        self._limit = limit
        self._paths = _BestPaths(root, limit)
        self._paths.add(drafted, probabilities)
        self._drafted = self._paths.totals
        if lookup:
            for leaf in dict.fromkeys((root, self._paths.end)):
                guesses = view.lookup_chain(leaf)
                self._paths.add(guesses, view.path_probabilities(guesses))
        self.gains = _differences(self._paths.totals)

    def nodes(self, count: int) -> list[Node]:
        return self._paths.nodes(count)

    def gains_after_growth(self, width: int, shares: Sequence[float], steps: int = 1) -> list[float]:
        totals = list(self._drafted)
        for node, path in self._open[:width]:
            length, total = self._paths.reached.get(node, (self._limit, 0.0))
            for _ in range(steps):
                if length == self._limit:
                    break
                path *= shares[0]
                length, total = length + 1, total + path
                if length == len(totals):
                    totals.append(total)
                else:
                    totals[length] = max(totals[length], total)
        return _differences(totals)


class _BestPaths:
    """For each length up to a limit, the path below the root with the highest sum of path probabilities."""

    def __init__(self, root: Node, limit: int) -> None:
        self._limit = limit
        self.reached: dict[Node, tuple[int, float]] = {root: (0, 0.0)}
        """Length and sum of the path to each node."""
        self._ends: list[Node] = [root]
        """Of the best path of each length."""

    @property
    def totals(self) -> list[float]:
        """The highest sum for each length, from 0."""
        return [self.reached[end][1] for end in self._ends]

    @property
    def end(self) -> Node:
        """The end of the path with the highest sum."""
        return max(self._ends, key=lambda end: self.reached[end][1])

    def add(self, nodes: Iterable[Node], probabilities: Iterable[float]) -> None:
        """More `nodes`, parents first, with their path probabilities. Those beyond the limit are left out."""
        for node, path in zip(nodes, probabilities, strict=True):
            above = None if node.parent is None else self.reached.get(node.parent)
            if above is None or above[0] == self._limit:
                continue
            length, total = above[0] + 1, above[1] + path
            self.reached[node] = length, total
            if length == len(self._ends):
                self._ends.append(node)
            elif total > self.reached[self._ends[length]][1]:
                self._ends[length] = node

    def nodes(self, length: int) -> list[Node]:
        """The best path of this length, top down."""
        path: list[Node] = []
        node: Node | None = self._ends[length]
        while node is not None and len(path) < length:
            path.append(node)
            node = node.parent
        return path[::-1]


def _differences(totals: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(totals)]


def _most_probable(view: SequenceView, limit: int) -> list[Node]:
    """The `limit` most probable nodes that the request still has room for, parents first."""
    deepest = view.tree.root.depth + view.room
    return list(islice((node for node in view.tree.best() if node.depth <= deepest), limit))
