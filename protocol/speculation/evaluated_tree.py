"""A token tree with the candidates of its evaluated nodes. Pure; knows no plan."""

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
    """Candidates of each node that the engine returns."""
    saguaro: float = 1.0
    """Factor on the probabilities of each node's `fans` best tokens (rejection mode)."""
    fans: Sequence[int] = ()
    """Bonus guesses planned at each node; empty unless `saguaro` is below 1."""


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
        best = enumerate(zip(found.tokens[:count], found.probabilities, strict=False))
        return [
            self.tree.add(node, token, probability, self._calibration(probability, rank))
            for rank, (token, probability) in best
            if token not in node.children
        ]

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
