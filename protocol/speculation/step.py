"""What one forward of the draft is to evaluate, and what it is to say of it. Pure data."""

from collections.abc import Sequence
from typing import NamedTuple

from protocol.speculation.token_tree import Node


class GrowthStep(NamedTuple):
    """Nodes for one forward, parents before children."""

    nodes: Sequence[Node]
    limit: int
    """Candidates wanted of each node."""
    saguaro: float = 1.0
    """Factor on the probabilities of each node's `fans` best tokens (rejection mode)."""
    fans: Sequence[int] = ()
    """Bonus guesses planned at each node; empty unless `saguaro` is below 1."""
