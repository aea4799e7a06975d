"""Running means, and the cost of a forward by its width, from observed forwards. Pure."""

from dataclasses import dataclass, field


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


class WidthCost:
    """Seconds of one forward over L tokens, for any L, from observed forwards.

    A weighted least-squares line with decaying weights. While widths hardly vary, a prior pulls its slope. Each width
    adds its measured mean deviation from the line, since kernels switch at some widths.
    """

    PRIOR_SLOPE = 0.03
    """Cost of one more token relative to the mean, until measured."""
    _PRIOR_WEIGHT = 4.0
    _DECAY = 0.995
    _OUTLIER = 3.0

    def __init__(self) -> None:
        self._weight = self._width = self._seconds = 0.0
        self._width_squared = self._product = 0.0
        self._mean_width = self._mean_seconds = self._slope = 0.0
        self._residuals: dict[int, Mean] = {}
        self._costs: dict[int, float] = {}
        """Results since the last observation: a decision asks for each width several times."""

    @property
    def known(self) -> bool:
        return self._weight > 0.0

    def observe(self, width: int, seconds: float) -> None:
        """A forward of `width` tokens took `seconds`; an outlier counts as three times the estimate."""
        if self._weight > 3.0:
            seconds = min(seconds, self._OUTLIER * self(width))
        decay = self._DECAY
        self._weight = decay * self._weight + 1.0
        self._width = decay * self._width + width
        self._seconds = decay * self._seconds + seconds
        self._width_squared = decay * self._width_squared + width * width
        self._product = decay * self._product + width * seconds
        self._fit()
        self._residuals.setdefault(width, Mean(window=64)).observe(seconds - self._line(width))
        self._costs.clear()

    def __call__(self, width: int) -> float:
        """Expected seconds for `width` tokens. Without any observation: 1 plus the prior slope."""
        cost = self._costs.get(width)
        if cost is None:
            cost = self._costs[width] = self._cost(width)
        return cost

    def _cost(self, width: int) -> float:
        if not self._weight:
            return 1.0 + self.PRIOR_SLOPE * (width - 1)
        line = self._line(width)
        residual = self._residuals.get(width)
        if residual is None:
            return line
        weight = min(residual.count, 64) / (min(residual.count, 64) + 8)
        return max(0.5 * line, line + weight * residual.get(0.0))

    def _fit(self) -> None:
        mean_width = self._mean_width = self._width / self._weight
        mean_seconds = self._mean_seconds = self._seconds / self._weight
        spread = self._width_squared - self._weight * mean_width**2
        covariance = self._product - self._weight * mean_width * mean_seconds
        prior = self.PRIOR_SLOPE * mean_seconds
        self._slope = max(0.0, (covariance + self._PRIOR_WEIGHT * prior) / (spread + self._PRIOR_WEIGHT))

    def _line(self, width: int) -> float:
        return max(0.2 * self._mean_seconds, self._mean_seconds + self._slope * (width - self._mean_width))


@dataclass(slots=True)
class ScaledCost:
    """Costs that are in a fixed ratio to other ones, whatever the width."""

    base: WidthCost
    ratio: Mean = field(default_factory=Mean)

    @property
    def known(self) -> bool:
        return self.base.known

    def observe(self, width: int, seconds: float) -> None:
        """A forward of `width` tokens took `seconds`."""
        self.ratio.observe(seconds / self.base(width))

    def __call__(self, width: int) -> float:
        """Expected seconds for `width` tokens."""
        return self.ratio.get(1.0) * self.base(width)
