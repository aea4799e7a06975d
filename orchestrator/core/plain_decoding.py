"""How fast plain decoding would have been in a request's own conditions, estimated from its forwards. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.core.policy.expected_rate import ForwardCost

_TRUST = 0.5
"""Weight of the expected slow-down beside what the forwards show, as a sum of squared shares."""
_MOST = 3.0
"""Largest believed slow-down of a forward by the draft."""


@dataclass(slots=True)
class ForwardSums:
    """Sums over forwards of one width. The share of a forward is the part of it in which the draft computed too."""

    count: int = 0
    seconds: float = 0.0
    share: float = 0.0
    share_squared: float = 0.0
    share_seconds: float = 0.0

    def add(self, seconds: float, share: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.share += share
        self.share_squared += share * share
        self.share_seconds += share * seconds


def plain_tokens_per_second(
    forwards: Mapping[int, ForwardSums], cost: ForwardCost, slowdown: float, overhead: float
) -> float:
    """The rate of plain decoding: 1 / (t + overhead).

    t is the time of a forward over one token while the draft rests. It is fitted to the forwards that the request had:

        seconds = t p(w) (1 + k share)

    * p(w) = cost(w) / cost(1), so forwards of one token count as they are and wider ones are scaled.
    * k, at least 0, is the slow-down by a draft that shares cores, memory or a GPU with the target: plain decoding has
      no draft. It is the slope of a least-squares line, pulled to `slowdown`, which was measured before, or is 0.

    Without forwards, t = cost(1) / (1 + slowdown). `forwards`: by width. `cost`: of forwards beside a growing draft.
    `overhead`: seconds of a round outside the forward.
    """
    count = sum(one.count for one in forwards.values())
    if not count:
        return 1.0 / max(1e-9, cost(1) / (1.0 + slowdown) + overhead)
    scale = {width: cost(1) / max(1e-9, cost(width)) for width in forwards}
    share = sum(one.share for one in forwards.values()) / count
    seconds = sum(scale[width] * one.seconds for width, one in forwards.items()) / count
    spread = sum(one.share_squared for one in forwards.values()) - count * share * share
    covariance = sum(scale[width] * one.share_seconds for width, one in forwards.items()) - count * share * seconds
    resting = seconds / (1.0 + slowdown * share)
    slope = max(0.0, (covariance + _TRUST * slowdown * resting) / (max(0.0, spread) + _TRUST))
    return 1.0 / max(1e-9, max(seconds / _MOST, seconds - slope * share) + overhead)
