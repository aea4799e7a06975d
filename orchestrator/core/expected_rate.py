"""The expected-rate rule: how many nodes to verify, and whether to wait for more growth. Pure arithmetic."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import ge
from typing import NamedTuple

ForwardCost = Callable[[int], float]
"""Seconds of one target forward over so many tokens, root included."""


class NodeCounts(NamedTuple):
    """Verify `nodes[i]` nodes of request i; expect `rate` tokens a second of all requests together."""

    nodes: list[int]
    rate: float


def best_count(gains: Sequence[float], cost: ForwardCost, overhead: float, roots: int = 1) -> tuple[int, float]:
    """The number of nodes L that maximises (R + sum of the first L gains) / (T(R + L) + overhead), and that rate.

    `gains`: the expected tokens that each further node adds. `overhead` is the hop plus any wait, in seconds; R is the
    number of `roots`, one a request, each of which yields a token. L = 0 is plain decoding.
    """
    tokens = accumulate(gains, initial=float(roots))
    rates = [expected / (cost(width) + overhead) for width, expected in enumerate(tokens, start=roots)]
    rate = max(rates)
    return rates.index(rate), rate


def best_counts(gains: Sequence[Sequence[float]], cost: ForwardCost, overhead: float) -> NodeCounts:
    """`best_count` for requests that share a forward, given the gains of each.

    The nodes with the highest gains go first. A node whose gain is below that of a later one counts with the mean of
    both, since the later one needs it.
    """
    if len(gains) == 1:
        nodes, rate = best_count(gains[0], cost, overhead)
        return NodeCounts([nodes], rate)
    ranked = sorted(((rank, request) for request, own in enumerate(gains) for rank in _falling(own)), reverse=True)
    following = [iter(own) for own in gains]
    nodes, rate = best_count([next(following[request]) for _, request in ranked], cost, overhead, len(gains))
    chosen = Counter(request for _, request in ranked[:nodes])
    return NodeCounts([chosen[request] for request in range(len(gains))], rate)


def _falling(gains: Sequence[float]) -> Sequence[float]:
    """The slopes of the least concave function above the sums of `gains`: runs that rise become their mean."""
    if all(map(ge, gains, gains[1:])):
        return gains
    runs: list[tuple[float, int]] = []
    for gain in gains:
        total, count = gain, 1
        while runs and runs[-1][0] / runs[-1][1] < total / count:
            earlier, places = runs.pop()
            total, count = total + earlier, count + places
        runs.append((total, count))
    return [total / count for total, count in runs for _ in range(count)]


def with_growth(probabilities: Sequence[float], open_paths: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Path probabilities expected after one growth step, falling.

    `open_paths` are the path probabilities of the nodes that the step expands. The estimate gives each of them
    children that are accepted with the probabilities `shares`.
    """
    return sorted([*probabilities, *(path * share for path in open_paths for share in shares)], reverse=True)
