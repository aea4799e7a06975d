"""Running estimates of what steps cost and how often guesses come true. Pure; fed by events."""

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
    """Seconds of one forward over L tokens, for any L, from those that were seen.

    A line through decayed sums, its slope drawn to a prior while widths hardly vary, plus what each
    width was measured to differ from the line (kernels switch at some widths).
    """

    PRIOR_SLOPE = 0.03
    """Cost of one more token relative to the mean, until measured."""
    _PRIOR_WEIGHT = 4.0
    _DECAY = 0.995
    _OUTLIER = 3.0

    def __init__(self) -> None:
        self._weight = self._width = self._seconds = 0.0
        self._width_squared = self._product = 0.0
        self._residuals: dict[int, Mean] = {}

    @property
    def known(self) -> bool:
        return self._weight > 0.0

    def observe(self, width: int, seconds: float) -> None:
        """A forward of `width` tokens took `seconds`; one far off the estimate is held to three times it."""
        if self._weight > 3.0:
            seconds = min(seconds, self._OUTLIER * self(width))
        keep = self._DECAY
        self._weight = keep * self._weight + 1.0
        self._width = keep * self._width + width
        self._seconds = keep * self._seconds + seconds
        self._width_squared = keep * self._width_squared + width * width
        self._product = keep * self._product + width * seconds
        self._residuals.setdefault(width, Mean(window=64)).observe(seconds - self._line(width))

    def __call__(self, width: int) -> float:
        """Expected seconds for `width` tokens. Without any observation: 1 plus the prior slope."""
        if not self.known:
            return 1.0 + self.PRIOR_SLOPE * (width - 1)
        line = self._line(width)
        residual = self._residuals.get(width)
        if residual is None:
            return line
        trust = min(residual.count, 64) / (min(residual.count, 64) + 8)
        return max(0.5 * line, line + trust * residual.get(0.0))

    def _line(self, width: int) -> float:
        mean_width = self._width / self._weight
        mean_seconds = self._seconds / self._weight
        spread = self._width_squared - self._weight * mean_width**2
        covariance = self._product - self._weight * mean_width * mean_seconds
        prior = self.PRIOR_SLOPE * mean_seconds
        slope = max(0.0, (covariance + self._PRIOR_WEIGHT * prior) / (spread + self._PRIOR_WEIGHT))
        return max(0.2 * mean_seconds, mean_seconds + slope * (width - mean_width))


@dataclass(slots=True)
class HitModel:
    """The exponent r of 1 - p_hit(F) = F^-r (arXiv 2603.03251), by maximum likelihood over decayed counts."""

    _DECAY = 0.99
    PRIOR = 0.8
    _hits: dict[int, float] = field(default_factory=dict)
    _misses: dict[int, float] = field(default_factory=dict)

    def observe(self, fan: int, hit: bool) -> None:
        """A bonus token was (not) among `fan` guesses. One guess tells nothing about r."""
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
    """Lets a draft rest that never guesses right: its work only takes memory bandwidth from the target."""

    _BARREN_ROUNDS = 32
    _LONGEST_REST = 256
    """Rounds. The first rest is as long as it takes to see that a draft is barren, each further one twice as long."""
    _barren: int = 0
    _rest: int = _BARREN_ROUNDS
    _left: int = 0

    @property
    def resting(self) -> bool:
        return self._left > 0

    def observe(self, guessed: bool | None) -> None:
        """A round is over; `guessed`: the target's next token was among the guesses, None if there were none."""
        if self._left:
            self._left -= 1
        elif guessed:
            self._barren, self._rest = 0, self._BARREN_ROUNDS
        elif guessed is not None:
            self._barren += 1
            if self._barren >= self._BARREN_ROUNDS:
                self._barren, self._left = 0, self._rest
                self._rest = min(2 * self._rest, self._LONGEST_REST)


@dataclass(slots=True)
class Estimates:
    """What was measured so far, for all sequences of one kind of sampling."""

    target: WidthCost = field(default_factory=WidthCost)
    hop: Mean = field(default_factory=Mean)
    """Seconds of a round that are neither the target's forward nor deliberate waiting."""
    step: Mean = field(default_factory=Mean)
    """Seconds of one growth step."""
    growth: WidthCost = field(default_factory=WidthCost)
    """Of one growth step."""
    prefill: Mean = field(default_factory=Mean)
    """Seconds of the draft's prefill a token."""
    recovery: Mean = field(default_factory=Mean)
    """Seconds from a miss to the first growth of the draft below the new root: the rest of a step in flight,
    a step, and the way there and back."""
    calibration: Calibration = field(default_factory=Calibration)
    lookup: Calibration = field(default_factory=Calibration)
    acceptance: Mean = field(default_factory=lambda: Mean(window=128, value=0.6, count=8))
    """a: the draft's main child of an accepted node is the target's choice. Begins as eight observations of 0.6."""
    hits: HitModel = field(default_factory=HitModel)
    usefulness: Usefulness = field(default_factory=Usefulness)

    def with_another_draft(self) -> "Estimates":
        """Nothing is known yet of that draft; what belongs to the target is one and the same."""
        return Estimates(target=self.target, hop=self.hop, lookup=self.lookup)


def _likelihood_slope(fan: int, exponent: float, hits: float, misses: float) -> float:
    miss = fan**-exponent
    return math.log(fan) * (hits * miss / (1.0 - miss) - misses)
