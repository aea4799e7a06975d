"""Running estimates of step times and of how often guesses are right. Pure; updated by events."""

import math
from dataclasses import dataclass, field

from protocol.speculation.calibration import Calibration


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
class HitModel:
    """The exponent r of 1 - p_hit(F) = F^-r (arXiv 2603.03251), by maximum likelihood over decayed counts."""

    _DECAY = 0.99
    PRIOR = 0.8
    _hits: dict[int, float] = field(default_factory=dict)
    _misses: dict[int, float] = field(default_factory=dict)

    def observe(self, fan: int, hit: bool) -> None:
        """The bonus token was (not) among `fan` guesses. A single guess is no evidence about r."""
        if fan < 2:
            return
        for counts in (self._hits, self._misses):
            for key in counts:
                counts[key] *= self._DECAY
        counts = self._hits if hit else self._misses
        counts[fan] = counts.get(fan, 0.0) + 1.0

    @property
    def exponent(self) -> float:
        """r in [0.05, 5]; the prior counts as four observations at a fan of 4."""
        low, high = 0.05, 5.0
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if self._slope(middle) > 0 else (low, middle)
        return (low + high) / 2

    def _slope(self, exponent: float) -> float:
        """Derivative of the log likelihood by r."""
        prior_miss = 4.0 ** (-self.PRIOR)
        slope = _likelihood_slope(4, exponent, 4 * (1 - prior_miss), 4 * prior_miss)
        for fan in self._hits.keys() | self._misses.keys():
            slope += _likelihood_slope(fan, exponent, self._hits.get(fan, 0.0), self._misses.get(fan, 0.0))
        return slope


@dataclass(slots=True)
class Usefulness:
    """Pauses a draft that never guesses right: its work only takes memory bandwidth from the target."""

    _MAX_WRONG_ROUNDS = 32
    _MAX_PAUSE = 256
    """Rounds. The first pause is as long as _MAX_WRONG_ROUNDS, each further one twice as long."""
    _wrong_rounds: int = 0
    """In a row."""
    _next_pause: int = _MAX_WRONG_ROUNDS
    _paused_rounds: int = 0
    """Rounds until the present pause ends; 0 if the draft is not paused."""

    @property
    def paused(self) -> bool:
        return self._paused_rounds > 0

    def observe(self, guessed: bool | None) -> None:
        """A round ended; `guessed`: the target's next token was among the guesses, None if there were none."""
        if self._paused_rounds:
            self._paused_rounds -= 1
        elif guessed:
            self._wrong_rounds, self._next_pause = 0, self._MAX_WRONG_ROUNDS
        elif guessed is not None:
            self._wrong_rounds += 1
            if self._wrong_rounds >= self._MAX_WRONG_ROUNDS:
                self._wrong_rounds, self._paused_rounds = 0, self._next_pause
                self._next_pause = min(2 * self._next_pause, self._MAX_PAUSE)


@dataclass(slots=True)
class Estimates:
    """Measurements of one draft with the target, for all sequences that are sampled, or for all greedy ones."""

    target: WidthCost = field(default_factory=WidthCost)
    hop: Mean = field(default_factory=Mean)
    """Seconds of a round that are neither the target's forward nor deliberate waiting."""
    step: Mean = field(default_factory=Mean)
    """Seconds of one growth step."""
    growth: WidthCost = field(default_factory=WidthCost)
    """Seconds of one growth step by its nodes."""
    prefill: Mean = field(default_factory=Mean)
    """Seconds of the draft's prefill per token."""
    recovery: Mean = field(default_factory=Mean)
    """Seconds from a miss to the first growth of the draft below the new root: the rest of the step in progress, one
    more step, and a round trip."""
    calibration: Calibration = field(default_factory=Calibration)
    """Of the draft's claims."""
    lookup: Calibration = field(default_factory=Calibration)
    """Of the claims of prompt lookup."""
    acceptance: Mean = field(default_factory=lambda: Mean(window=128, value=0.6, count=8))
    """a: the draft's main child of an accepted node is the target's choice. Begins as eight observations of 0.6."""
    hits: HitModel = field(default_factory=HitModel)
    usefulness: Usefulness = field(default_factory=Usefulness)

    def with_another_draft(self) -> "Estimates":
        """Estimates of another draft with the same target: the target's part is shared, the draft's is empty."""
        return Estimates(target=self.target, hop=self.hop, lookup=self.lookup)


def _likelihood_slope(fan: int, exponent: float, hits: float, misses: float) -> float:
    miss = fan**-exponent
    return math.log(fan) * (hits * miss / (1.0 - miss) - misses)
