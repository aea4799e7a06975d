"""Running means of what is measured: of a figure, and of a forward's seconds by its width. Pure."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Mean:
    """An exponential running mean whose first observations count in full."""

    window: int = 32
    value: float | None = None
    count: int = 0

    def observe(self, value: float) -> None:
        self.count += 1
        share = 1.0 / min(self.count, self.window)
        self.value = value if self.value is None else self.value + share * (value - self.value)

    def get(self, default: float) -> float:
        return default if self.value is None else self.value


MeasuredCost = tuple[int, float]
"""Width and seconds of a forward."""
_NARROW_AT_FIRST, _NARROW_LATER = 8, 48
"""Forwards, until there have been so many over one token, and then."""
_LEAST_SECONDS = 1e-6
"""A worker may claim that a forward took no time, and rates divide by it."""
_MAX_RATIO = 100.0
"""Largest believed ratio of two measured costs: a worker may claim any."""


class WidthCost:
    """Seconds of one forward over w tokens, for any w, from observed forwards.

    cost(w) = r(w) (m + b (p(w) - p̄)), where

    * p(w) is the prior: the worker's measured cost of the nearest measured width that is not narrower, relative to the
      narrowest one; beyond the widest, the mean cost of one more token continues. So no line is drawn between two
      widths at which kernels switch, and costs need not rise with the width. Without measurements,
      p(w) = 1 + 0.03 (w - 1).
    * m + b (p - p̄) is a weighted least-squares line through observed (p(w), seconds), with decaying weights. It scales
      the prior (another clock, a busy device) and shifts it (attention over a longer context adds about the same to
      every width). b is pulled to m / p̄, which is a pure scale: strongly by a measured prior, weakly without one.
    * r(w) is the running mean of observed cost relative to that line at this width, shrunk to 1 while it has few
      observations.
    """

    PRIOR_SLOPE = 0.03
    """Cost of one more token relative to a forward of one, while nothing is measured."""
    _ASSUMED_WEIGHT = 4.0 * PRIOR_SLOPE**2
    """Weight of the pure scale beside observations without a measured prior: four observations one token apart."""
    _MEASURED_WEIGHT = 2.0
    """The same with a measured prior: about a dozen observations that differ by half of a forward of one token."""
    _DECAY = 0.995
    _OUTLIER = 3.0
    _SHRINKAGE = 8
    """Observations of a width that count as much as the prior's shape."""
    _MEMORY = 64

    def __init__(self, measured: Sequence[MeasuredCost] = ()) -> None:
        """`measured`: by rising width; none if the worker measured nothing."""
        self._weight = self._prior = self._seconds = self._prior_squared = self._product = 0.0
        self._mean_prior = self._mean_seconds = self._slope = 0.0
        self._ratios: dict[int, Mean] = {}
        self._costs: dict[int, float] = {}
        """Results since the last observation: a decision asks for each width several times."""
        self._widths: list[int] = []
        self._since_narrow = 0
        """Forwards since the last one over one token."""
        self._unit = 1.0
        """Measured seconds at the narrowest width."""
        self._measured: list[float] = []
        """p of `_widths`."""
        self.expect(measured)

    @property
    def known(self) -> bool:
        return bool(self._measured) or self.observed

    @property
    def observed(self) -> bool:
        return self._weight > 0.0

    def expect(self, measured: Sequence[MeasuredCost]) -> None:
        """A worker with these measurements has come up: they replace all that was observed of its predecessor.

        A worker that measured nothing continues its predecessor's estimate.
        """
        if not measured:
            return
        self._widths = [width for width, _ in measured]
        self._unit = measured[0][1]
        self._measured = [min(max(seconds / self._unit, 1 / _MAX_RATIO), _MAX_RATIO) for _, seconds in measured]
        self._weight = self._prior = self._seconds = self._prior_squared = self._product = 0.0
        self._ratios.clear()
        self._costs.clear()

    @property
    def narrow_due(self) -> bool:
        """Forwards over one token have become so rare that the line no longer tells what they cost."""
        known = self._ratios[1].count if 1 in self._ratios else 0
        return self._since_narrow >= (_NARROW_AT_FIRST if known < _NARROW_AT_FIRST else _NARROW_LATER)

    def observe(self, width: int, seconds: float) -> None:
        """A forward of `width` tokens took `seconds`; an outlier counts as three times the estimate."""
        seconds = max(_LEAST_SECONDS, seconds)
        if self._measured or self._weight > 3.0:
            seconds = min(seconds, self._OUTLIER * self(width))
        decay, prior = self._DECAY, self._prior_of(width)
        self._weight = decay * self._weight + 1.0
        self._prior = decay * self._prior + prior
        self._seconds = decay * self._seconds + seconds
        self._prior_squared = decay * self._prior_squared + prior * prior
        self._product = decay * self._product + prior * seconds
        self._since_narrow = 0 if width == 1 else self._since_narrow + 1
        self._fit()
        line = self._line(width)
        self._ratios.setdefault(width, Mean(window=self._MEMORY)).observe(seconds / line if line > 0.0 else 1.0)
        self._costs.clear()

    def __call__(self, width: int) -> float:
        """Expected seconds for `width` tokens. Without measurements or observations: 1 plus the prior slope."""
        cost = self._costs.get(width)
        if cost is None:
            cost = self._costs[width] = self._cost(width)
        return cost

    def _cost(self, width: int) -> float:
        if not self._weight:
            return self._unit * self._prior_of(width)
        line = self._line(width)
        ratio = self._ratios.get(width)
        if ratio is None:
            return line
        count = min(ratio.count, self._MEMORY)
        return line * max(0.5, 1.0 + count / (count + self._SHRINKAGE) * (ratio.get(1.0) - 1.0))

    def _prior_of(self, width: int) -> float:
        """p(w)."""
        if not self._measured:
            return 1.0 + self.PRIOR_SLOPE * (width - 1)
        index = bisect_left(self._widths, width)
        if index < len(self._widths):
            return self._measured[index]
        widest, highest = self._widths[-1], self._measured[-1]
        if widest == self._widths[0]:
            return highest + self.PRIOR_SLOPE * (width - widest)
        return highest + max(0.0, highest - self._measured[0]) / (widest - self._widths[0]) * (width - widest)

    def _fit(self) -> None:
        mean_prior = self._mean_prior = self._prior / self._weight
        mean_seconds = self._mean_seconds = self._seconds / self._weight
        spread = self._prior_squared - self._weight * mean_prior**2
        covariance = self._product - self._weight * mean_prior * mean_seconds
        trust = self._MEASURED_WEIGHT if self._measured else self._ASSUMED_WEIGHT
        self._slope = max(0.0, (covariance + trust * mean_seconds / mean_prior) / (spread + trust))

    def _line(self, width: int) -> float:
        line = self._mean_seconds + self._slope * (self._prior_of(width) - self._mean_prior)
        return max(0.2 * self._mean_seconds, line)
