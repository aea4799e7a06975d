"""What comes out of a drill: a promise, what was measured, and what broke it, if anything did. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

OnStep = Callable[[], None]
"""Called once for every fault that was dealt with."""


@dataclass(frozen=True, slots=True)
class DrillOutcome:
    """A promise and its measurement. It held if there is neither a failure nor anything late."""

    promise: str
    measured: str
    failures: Sequence[str] = ()
    """Wrong tokens, failed requests, leftovers: sentences."""
    late: Sequence[str] = ()
    """Time limits that were missed: sentences. On a busy machine these may be the machine's fault."""
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def held(self) -> bool:
        return not self.failures and not self.late


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all values do not exceed (nearest rank); NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and most of some times, as figures in milliseconds."""
    shares = {"p50": 0.5, "p99": 0.99, "most": 1.0}
    return {f"{name}_{label}_ms": round(1000 * percentile(seconds, share), 1) for label, share in shares.items()}


def too_late(what: str, seconds: float, limit: float) -> list[str]:
    """A sentence if `seconds` exceeds `limit`."""
    return [f"{what} took {1000 * seconds:.0f} ms, {1000 * limit:.0f} were promised."] if seconds > limit else []


def milliseconds(seconds: Sequence[float]) -> str:
    """Median, 99th percentile and most, for people."""
    p50, p99, most = (1000 * percentile(seconds, share) for share in (0.5, 0.99, 1.0))
    return f"{p50:.0f} / {p99:.0f} / {most:.0f} ms"
