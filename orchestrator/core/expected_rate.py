"""The expected-rate rule: how many nodes to verify, and whether to wait for more growth. Pure arithmetic."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import ge
from typing import NamedTuple

ForwardCost = Callable[[int], float]
"""Seconds of one target forward over so many tokens, root included."""


class Expected(NamedTuple):
    """What verifying so many nodes is expected to give."""

    nodes: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def surplus(self, usual: float) -> float:
        """Tokens beyond those that `usual` tokens a second give in the same time (Dinkelbach 1967): choices of a higher
        surplus at the rate that is reached raise that rate."""
        return self.tokens - usual * self.seconds


def best_count(
    gains: Sequence[float], cost: ForwardCost, overhead: float, roots: int = 1, usual: float | None = None
) -> Expected:
    """The number of nodes L with the highest surplus at the `usual` rate; without one, with the highest rate.

    L nodes give R + the sum of the first L gains and take T(R + L) + overhead. `gains`: the expected tokens that each
    further node adds. `overhead` is the hop plus any wait, in seconds; R is the number of `roots`, one a request, each
    of which yields a token. L = 0 is plain decoding.
    """
    best, highest = (0, 0.0, 0.0), -math.inf
    # Every round asks for many counts, so none of them becomes an object.
    for nodes, tokens in enumerate(accumulate(gains, initial=float(roots))):
        seconds = cost(roots + nodes) + overhead
        value = tokens / seconds if usual is None else tokens - usual * seconds
        if not nodes or value > highest:
            best, highest = (nodes, tokens, seconds), value
    return Expected(*best)


def best_counts(
    gains: Sequence[Sequence[float]], cost: ForwardCost, overhead: float, usual: float | None = None
) -> tuple[list[int], Expected]:
    """`best_count` for requests that share a forward, given the gains of each: the nodes of each, and all together.

    The nodes with the highest gains go first. A node whose gain is below that of a later one counts with the mean of
    both, since the later one needs it.
    """
    if len(gains) == 1:
        best = best_count(gains[0], cost, overhead, usual=usual)
        return [best.nodes], best
    ranked = sorted(((rank, request) for request, own in enumerate(gains) for rank in _falling(own)), reverse=True)
    following = [iter(own) for own in gains]
    best = best_count([next(following[request]) for _, request in ranked], cost, overhead, len(gains), usual)
    chosen = Counter(request for _, request in ranked[: best.nodes])
    return [chosen[request] for request in range(len(gains))], best


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
