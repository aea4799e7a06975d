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
    """Of the growth step that found the nodes, as in a Grow."""

    evaluated: int = 0
    seconds: float = 0.0
    joint: int = 0


def growth_messages(
    sequence: SequenceId,
    round: Round,
    nodes: Sequence[Node],
    candidates: Mapping[NodeId, Candidates],
    cost: StepCost,
) -> Iterator[Grow]:
    """The nodes as one Grow, or as several where they are too many; the cost is told with the first.

    A step that found nothing is a Grow too: it says that the draft has spoken.
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
            joint=cost.joint if start == 0 else 0,
            distributions=tuple(_distributions(parents, candidates)),
        )


def _distributions(parents: Sequence[NodeId], candidates: Mapping[NodeId, Candidates]) -> Iterator[Distribution]:
    """What each parent's main child was drawn from, once a parent."""
    for parent, _ in groupby(parents):
        found = candidates.get(parent)
        if found is not None and found.support is not None:
            yield Distribution(parent, tuple(found.support.tokens), tuple(found.support.probabilities))


def _parent(node: Node) -> NodeId:
    assert node.parent is not None, "the root is never published"
    return node.parent.id
