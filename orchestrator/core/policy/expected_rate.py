"""The expected-rate rule: how many nodes to verify, and whether to wait for more growth. Pure arithmetic."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

ForwardCost = Callable[[int], float]
"""Seconds of one target forward over so many tokens, root included."""


@dataclass(frozen=True, slots=True)
class NodeCount:
    """Verify `nodes` nodes; expect `rate` tokens a second."""

    nodes: int
    rate: float


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """Verify `nodes[i]` nodes of request i; expect `rate` tokens a second of all requests together."""

    nodes: list[int]
    rate: float


def best_count(probabilities: Sequence[float], cost: ForwardCost, overhead: float, roots: int = 1) -> NodeCount:
    """The number of nodes L that maximises (R + sum of the first L path probabilities) / (T(R + L) + overhead).

    `probabilities` fall; `overhead` is the hop plus any wait, in seconds; R is the number of `roots`, one a request,
    each of which yields a token. L = 0 is plain decoding.
    """
    tokens = accumulate(probabilities, initial=float(roots))
    rates = [expected / (cost(width) + overhead) for width, expected in enumerate(tokens, start=roots)]
    rate = max(rates)
    return NodeCount(rates.index(rate), rate)


def best_counts(probabilities: Sequence[Sequence[float]], cost: ForwardCost, overhead: float) -> NodeCounts:
    """`best_count` for requests whose trees share a forward, given the falling path probabilities of each.

    The nodes are the most probable ones of all trees together.
    """
    if len(probabilities) == 1:
        alone = best_count(probabilities[0], cost, overhead)
        return NodeCounts([alone.nodes], alone.rate)
    ranked = sorted(((path, request) for request, paths in enumerate(probabilities) for path in paths), reverse=True)
    best = best_count([path for path, _ in ranked], cost, overhead, len(probabilities))
    chosen = Counter(request for _, request in ranked[: best.nodes])
    return NodeCounts([chosen[request] for request in range(len(probabilities))], best.rate)


def with_growth(probabilities: Sequence[float], open_paths: Sequence[float], acceptance: float) -> list[float]:
    """Path probabilities expected after one growth step.

    `open_paths` are the path probabilities of the nodes that the step expands. The estimate gives each of them one
    child, which is accepted with probability `acceptance`.
    """
    return sorted([*probabilities, *(path * acceptance for path in open_paths)], reverse=True)
