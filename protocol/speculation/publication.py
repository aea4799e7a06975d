"""Tree nodes as Grow messages of bounded size. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from protocol.messages.base import MAX_NODES, NodeId, Round, SequenceId
from protocol.messages.plans import Distribution
from protocol.messages.worker import Grow
from protocol.speculation.candidates import Candidates
from protocol.speculation.token_tree import Node


class StepCost(NamedTuple):
    """Cost of the growth step that added the nodes, as in a Grow."""

    evaluated: int = 0
    seconds: float = 0.0
    forward_nodes: int = 0
    staleness: int = 0


def growth_messages(
    sequence: SequenceId,
    round: Round,
    nodes: Sequence[Node],
    candidates: Mapping[NodeId, Candidates],
    cost: StepCost,
) -> Iterator[Grow]:
    """The nodes as one Grow, or as several if they exceed its bound. The first Grow has the cost.

    A step that added no node is a Grow too: it shows that the draft is not silent.
    """
    for start in range(0, max(1, len(nodes)), MAX_NODES):
        part = nodes[start : start + MAX_NODES]
        parents = tuple(_parent(node) for node in part)
        yield Grow(
            sequence=sequence,
            round=round,
            parents=parents,
            tokens=tuple(node.token for node in part),
            probabilities=tuple(node.probability for node in part),
            evaluated=cost.evaluated if start == 0 else 0,
            seconds=cost.seconds if start == 0 else 0.0,
            forward_nodes=cost.forward_nodes if start == 0 else 0,
            staleness=cost.staleness if start == 0 else 0,
            distributions=tuple(_distributions(parents, candidates)),
        )


def _distributions(parents: Sequence[NodeId], candidates: Mapping[NodeId, Candidates]) -> Iterator[Distribution]:
    """The distribution that each parent's main child was sampled from, once for each parent."""
    for parent, _ in groupby(parents):
        found = candidates.get(parent)
        if found is not None and found.support is not None:
            yield Distribution(parent, tuple(found.support.tokens), tuple(found.support.probabilities))


def _parent(node: Node) -> NodeId:
    assert node.parent is not None, "the root is never published"
    return node.parent.id
