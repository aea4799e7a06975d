"""Running estimates of step times and of how often guesses are right. Pure. Updated by events."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import ClassVar

from orchestrator.core.policy.running_means import Mean, MeasuredCost, WidthCost
from orchestrator.core.policy.tries import Freshness, TurnTaking, Usefulness
from protocol.messages.worker import Hello
from protocol.speculation.calibration import Calibration


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
class GuessRanks:
    """How often the target chooses a draft's guess behind an accepted node, by the rank of the guess."""

    _PRIOR: ClassVar[tuple[float, ...]] = (0.6, 0.12, 0.06, 0.04, 0.025, 0.02, 0.015, 0.01)
    """Of small drafts of one family, as eight observations."""
    _WINDOW: ClassVar[int] = 128
    _means: list[Mean] = field(
        default_factory=lambda: [Mean(GuessRanks._WINDOW, value=share, count=8) for share in GuessRanks._PRIOR]
    )

    def observe(self, guesses: int, chosen: int | None) -> None:
        """A node had so many guesses; the target chose the one of this rank, or none of them."""
        for rank, mean in enumerate(self._means[:guesses]):
            mean.observe(float(rank == chosen))

    def shares(self, guesses: int) -> list[float]:
        """Of each of so many guesses, the best first; none is believed to be better than the one before it.

        The best one counts with its standard error: a few wrong guesses must not end the asking that would correct it.
        """
        best, *others = (mean.get(0.0) for mean in self._means[:guesses])
        error = math.sqrt(best * (1.0 - best) / self._means[0].count)
        return list(accumulate((best + error, *others), min))


@dataclass(slots=True)
class Estimates:
    """Measurements of one draft with the target, for all sequences that are sampled, or for all greedy ones."""

    beside_draft: WidthCost = field(default_factory=WidthCost)
    """Of the target's forwards while the draft grows."""
    beside_resting_draft: WidthCost = field(default_factory=WidthCost)
    turns: TurnTaking = field(default_factory=TurnTaking)
    """Shared by greedy and sampled requests."""
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
    first_response: Mean = field(default_factory=Mean)
    """Seconds from the request for the first growth step below a root to its growth, of a draft that drafts in turns:
    it reads what was accepted, and follows a forward of the target."""
    next_response: Mean = field(default_factory=Mean)
    """The same for the steps behind it."""
    unasked: int = 0
    """Rounds since a draft that drafts in turns was last asked for a step."""
    calibration: Calibration = field(default_factory=Calibration)
    """Of the draft's claims."""
    lookup: Calibration = field(default_factory=Calibration)
    """Of the claims of prompt lookup."""
    acceptance: Mean = field(default_factory=lambda: Mean(window=128, value=0.6, count=8))
    """a: the draft's main child of an accepted node is the target's choice. Begins as eight observations of 0.6."""
    ranks: GuessRanks = field(default_factory=GuessRanks)
    hits: HitModel = field(default_factory=HitModel)
    usefulness: Usefulness = field(default_factory=Usefulness)
    freshness: Freshness | None = None
    """None for a draft that reads tokens alone."""

    @property
    def target(self) -> WidthCost:
        """Of the target's forwards in the present mode."""
        return self.beside_resting_draft if self.turns.in_turns else self.beside_draft

    @property
    def slowdown(self) -> float:
        """By how much of its time a growing draft prolongs a forward; 0 until both modes were measured."""
        beside, resting = self.beside_draft, self.beside_resting_draft
        return max(0.0, beside(1) / resting(1) - 1.0) if beside.observed and resting.observed else 0.0

    def with_another_draft(self, turns: TurnTaking) -> "Estimates":
        """Estimates of another draft with the same target: the target's part is shared, the draft's is empty."""
        return Estimates(
            turns=turns,
            beside_draft=self.beside_draft,
            beside_resting_draft=self.beside_resting_draft,
            hop=self.hop,
            lookup=self.lookup,
        )

    def with_costs_of(self, other: "Estimates") -> "Estimates":
        """These estimates of the draft, and the target's costs of `other`: all are shared."""
        return replace(self, beside_draft=other.beside_draft, beside_resting_draft=other.beside_resting_draft)

    def expect_target(self, costs: Sequence[MeasuredCost]) -> None:
        """A target with these measured costs has come up."""
        for cost in (self.beside_draft, self.beside_resting_draft):
            cost.expect(costs)

    def expect_draft(self, hello: Hello) -> None:
        """A new life of this draft has come up."""
        self.growth.expect(hello.costs)
        if hello.features is not None:
            self.freshness = self.freshness or Freshness()


def _likelihood_slope(fan: int, exponent: float, hits: float, misses: float) -> float:
    miss = fan**-exponent
    return math.log(fan) * (hits * miss / (1.0 - miss) - misses)
