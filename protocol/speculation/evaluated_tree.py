"""A token tree, the nodes to evaluate next and what the draft said of those evaluated. Pure; knows no plan."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from protocol.messages.base import NodeId
from protocol.speculation.calibration import Calibration
from protocol.speculation.candidates import Candidates
from protocol.speculation.token_tree import Node, TokenTree


class GrowthStep(NamedTuple):
    """Nodes for one forward, parents before children."""

    nodes: Sequence[Node]
    limit: int
    """Candidates wanted of each node."""
    saguaro: float = 1.0
    """Factor on the probabilities of each node's `fans` best tokens (rejection mode)."""
    fans: Sequence[int] = ()
    """Bonus guesses planned at each node; empty unless `saguaro` is below 1."""


class EvaluatedTree:
    """The tree holds what was published; the candidates kept here may be published later."""

    def __init__(self, tree: TokenTree, horizon: int, calibration: Calibration) -> None:
        """`horizon`: nodes at this absolute position and beyond are never evaluated. `calibration` says what
        the draft's claims are worth, and learns it from what the target committed."""
        self.tree = tree
        self._calibration = calibration
        self.candidates: dict[NodeId, Candidates] = {}
        self._horizon = horizon

    def is_open(self, node: Node) -> bool:
        """Whether the node can still be evaluated."""
        return node.id not in self.candidates and node.depth < self._horizon

    def record(self, nodes: Iterable[Node], candidates: Iterable[Candidates]) -> None:
        self.candidates.update((node.id, found) for node, found in zip(nodes, candidates, strict=True))

    def adopt(self, node: Node, count: int) -> list[Node]:
        """Make the first `count` candidates of an evaluated node its children; returns the new ones."""
        found = self.candidates.get(node.id)
        if found is None:
            return []
        best = enumerate(zip(found.tokens[:count], found.probabilities, strict=False))
        return [
            self.tree.add(node, token, chance, self._calibration(chance, rank))
            for rank, (token, chance) in best
            if token not in node.children
        ]

    def advance(self, tokens: Sequence[int]) -> list[Node]:
        """Move the root along `tokens`; returns the committed nodes, old root first."""
        self._learn(tokens)
        committed = self.tree.advance(tokens)
        self.candidates = {id: found for id, found in self.candidates.items() if self.tree.get(id) is not None}
        return committed

    def _learn(self, tokens: Sequence[int]) -> None:
        """Compare what was guessed at the evaluated nodes of a committed path with what the target said."""
        node: Node | None = self.tree.root
        for token in tokens:
            if node is None or node.id not in self.candidates:
                return
            found = self.candidates[node.id]
            for rank, (guess, chance) in enumerate(zip(found.tokens, found.probabilities, strict=True)):
                self._calibration.observe(chance, rank, guess == token)
            node = node.children.get(token)
