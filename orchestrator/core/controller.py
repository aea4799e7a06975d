"""The expected-rate rule: how many nodes to verify, and whether to wait for more growth. Pure arithmetic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

Cost = Callable[[int], float]
"""Seconds of one target forward over so many tokens, root included."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Verify this many nodes; expect so many tokens a second of it."""

    nodes: int
    rate: float


def best_count(probabilities: Sequence[float], cost: Cost, overhead: float) -> Choice:
    """The number of nodes L that maximises (1 + sum of the first L path probabilities) / (T(1 + L) + overhead).

    `probabilities` fall; `overhead` is the hop plus any wait, in seconds. L = 0 is plain decoding.
    """
    tokens = accumulate(probabilities, initial=1.0)
    rates = [expected / (cost(1 + nodes) + overhead) for nodes, expected in enumerate(tokens)]
    nodes = max(range(len(rates)), key=rates.__getitem__)
    return Choice(nodes, rates[nodes])


def with_growth(probabilities: Sequence[float], open_paths: Sequence[float], acceptance: float) -> list[float]:
    """Path probabilities as they may look after one growth step.

    `open_paths` are the path probabilities of the nodes that the step expands; each is taken to get
    one child that is accepted with probability `acceptance`.
    """
    return sorted([*probabilities, *(path * acceptance for path in open_paths)], reverse=True)
