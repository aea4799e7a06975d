"""The cost of a forward by its number of tokens: fixed, per token, and as a share of the memory's bandwidth. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class CostLine(NamedTuple):
    """Seconds of a forward of w tokens: fixed + marginal * w."""

    fixed: float
    marginal: float
    deviation: float
    """The largest distance of a measured time from the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCost:
    """The forwards of one model on its own cores."""

    model: str
    """target or draft."""
    seconds: Mapping[int, float]
    """Medians by width."""
    weights: int
    """Bytes that a forward of one token reads."""
    bandwidth: float | None
    """Bytes a second of the stream test on the same cores; None where the model computes on a GPU."""

    @property
    def line(self) -> CostLine:
        return least_squares(self.seconds)

    @property
    def bandwidth_share(self) -> float | None:
        """Bytes a second of the weights in a forward of one token, as a share of the stream test's."""
        return None if self.bandwidth is None else self.weights / self.seconds[1] / self.bandwidth

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values. Times in milliseconds."""
        line = self.line
        return {
            "model": self.model,
            "milliseconds": {str(width): 1e3 * seconds for width, seconds in self.seconds.items()},
            "fixed_milliseconds": 1e3 * line.fixed,
            "marginal_milliseconds": 1e3 * line.marginal,
            "largest_deviation_milliseconds": 1e3 * line.deviation,
            "weights_bytes": self.weights,
            "stream_bytes_per_second": self.bandwidth,
            "bandwidth_share": self.bandwidth_share,
        }


def least_squares(seconds: Mapping[int, float]) -> CostLine:
    """The line through times by width, at least two, with the least sum of squared distances."""
    widths, times = np.array(list(seconds)), np.array(list(seconds.values()))
    design = np.stack([np.ones(len(widths)), widths], axis=1)
    (fixed, marginal), *_ = np.linalg.lstsq(design, times, rcond=None)
    deviation = np.abs(design @ (fixed, marginal) - times).max()
    return CostLine(float(fixed), float(marginal), float(deviation))
