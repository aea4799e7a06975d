"""The expected-rate rule: how many nodes to verify, and whether to wait for more growth. Pure arithmetic."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import ge

ForwardCost = Callable[[int], float]
"""Seconds of one target forward over so many tokens, root included."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the rest of a round gives, of all its requests together."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def worth(self, usual: float | None) -> float:
        """`rate`, or with the `usual` tokens a second of whole rounds: the tokens beyond those that usual rounds give
        in the same time.

        A wait that has passed is in no rate of what is left of a round, but every round has it again. Only the usual
        rate knows that: the choices that maximise this surplus maximise the tokens a second of all rounds (Dinkelbach,
        "On nonlinear fractional programming", 1967).
        """
        return self.rate if usual is None else self.tokens - usual * self.seconds


@dataclass(frozen=True, slots=True)
class NodeCount(Expected):
    """If `nodes` nodes are verified."""

    nodes: int


@dataclass(frozen=True, slots=True)
class NodeCounts(Expected):
    """If `nodes[i]` nodes of request i are verified."""

    nodes: list[int]


def best_count(
    gains: Sequence[float], cost: ForwardCost, overhead: float, roots: int = 1, usual: float | None = None
) -> NodeCount:
    """The number of nodes L with the highest `worth`: of R + sum of the first L gains tokens in T(R + L) + overhead.

    `gains`: the expected tokens that each further node adds. `overhead` is the hop plus any wait, in seconds; R is the
    number of `roots`, one a request, each of which yields a token. L = 0 is plain decoding.
    """
    tokens = accumulate(gains, initial=float(roots))
    counts = [NodeCount(expected, cost(roots + nodes) + overhead, nodes) for nodes, expected in enumerate(tokens)]
    return max(counts, key=lambda count: count.worth(usual))


def best_counts(
    gains: Sequence[Sequence[float]], cost: ForwardCost, overhead: float, usual: float | None = None
) -> NodeCounts:
    """`best_count` for requests that share a forward, given the gains of each.

    The nodes with the highest gains go first. A node whose gain is below that of a later one counts with the mean of
    both, since the later one needs it.
    """
    if len(gains) == 1:
        alone = best_count(gains[0], cost, overhead, usual=usual)
        return NodeCounts(alone.tokens, alone.seconds, [alone.nodes])
    ranked = sorted(((rank, request) for request, own in enumerate(gains) for rank in _falling(own)), reverse=True)
    following = [iter(own) for own in gains]
    best = best_count([next(following[request]) for _, request in ranked], cost, overhead, len(gains), usual)
    chosen = Counter(request for _, request in ranked[: best.nodes])
    return NodeCounts(best.tokens, best.seconds, [chosen[request] for request in range(len(gains))])


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
