"""Running estimates of step times and of how often guesses are right, and two choices that are tried both ways. Pure.

`TurnTaking`: draft and target compute apart, at the same time, or on one device, in turns. `Freshness`: a hit verifies
the cached guesses, or is given up for guesses that know the target's latest features. Updated by events.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, NamedTuple

from orchestrator.core.policy.running_means import Mean, MeasuredCost, WidthCost
from protocol.speculation.calibration import Calibration

_FIRST_ROUNDS = 256
"""Rounds before the first try of the other mode."""
_TRY_ROUNDS = 24
_LONG_REQUEST = 256
"""Tokens that a request must have left, so that it can gain from a try."""
_CLEAR_LOSS = 0.8
"""A try that is slower by this factor ends early."""
_SETTLING_ROUNDS = 2
"""After a change of the mode the draft follows the old plan for so long."""
_GAIN = 1.03
"""The other mode must be faster by this factor: rates of short tries are uncertain."""
_SHORT_TRY_ROUNDS = 4
"""Rounds of a try in turns that measure the slow-down."""
_PATIENCE = 256
_MAX_PATIENCE = 4096
"""Rounds until the other mode is tried again; they double with each try that fails."""
_WINDOW = 24
_OUTLIER = 4.0
"""A round counts as at most this many mean rounds: a stall says nothing about the mode."""
_MEMORY = 64
"""Rounds of each choice that `Freshness` remembers."""


class MeasuredRound(NamedTuple):
    """One round of a single request."""

    tokens: float
    """Expected of it."""
    seconds: float
    """From the root to the next root."""
    width: int
    """Tokens of the target's forward."""
    forward: float
    """Seconds of that forward."""
    remaining: int = 1 << 20
    """Tokens that the request may still generate."""


@dataclass(slots=True)
class _Rate:
    """Expected tokens a second, over a decaying window."""

    rounds: int = 0
    _tokens: float = 0.0
    _seconds: float = 0.0

    def add(self, round: MeasuredRound) -> None:
        tokens, seconds = round.tokens, round.seconds
        if self.rounds:
            seconds = min(seconds, _OUTLIER * self._seconds)
        self.rounds += 1
        share = 1.0 / min(self.rounds, _WINDOW)
        self._tokens += share * (tokens - self._tokens)
        self._seconds += share * (seconds - self._seconds)

    @property
    def per_second(self) -> float:
        return self._tokens / max(1e-9, self._seconds)


@dataclass(slots=True)
class TurnTaking:
    """Where draft and target compute. Tries each mode for some rounds and keeps the faster one.

    On one GPU, or on few cores, a draft that grows the tree during a forward slows the target down. In turns it grows
    only while the target waits for it. The hardware decides first; measurement may overrule it.

    A round counts with the tokens that were expected of it, 1 + the sum of its nodes' path probabilities: these vary
    less than the tokens that came, and both modes expect alike.
    """

    in_turns: bool = False
    """The present mode: the draft rests until it is asked for a step. It begins as what the hardware suggests."""
    fixed: bool = False
    """The user chose the mode, so the other one is never tried."""
    _rate: _Rate = field(default_factory=_Rate)
    """Of the mode that was chosen."""
    _try: _Rate | None = None
    """Of the other mode, while it is tried."""
    _saved: Mean = field(default_factory=Mean)
    """Seconds by which forwards were shorter in the try."""
    _settling: int = 0
    _next_try: int = _FIRST_ROUNDS
    """Rounds until the other mode is tried."""
    _patience: int = _PATIENCE

    @property
    def settled(self) -> bool:
        """No other mode is tried."""
        return self._try is None and not self._settling

    def observe(self, round: MeasuredRound, beside_draft: WidthCost, step: float) -> None:
        """`beside_draft`: costs of the target's forwards while the draft grows. `step`: seconds of a growth step."""
        if self.fixed:
            return
        if self._settling:
            self._settling -= 1
        elif self._try is not None:
            self._try.add(round)
            self._saved.observe(beside_draft(round.width) - round.forward)
            self._judge(self._try, step)
        else:
            self._rate.add(round)
            self._next_try -= 1
            if self._next_try <= 0 and round.remaining >= _LONG_REQUEST:
                self._begin_try()

    def _begin_try(self) -> None:
        self._try, self._saved = _Rate(), Mean()
        self._switch()

    def _judge(self, trial: _Rate, step: float) -> None:
        # In turns, a round waits for a growth step at least. Less of a slow-down is not worth it.
        hopeless = self.in_turns and trial.rounds >= _SHORT_TRY_ROUNDS and self._saved.get(0.0) < step
        hopeless |= trial.rounds >= _SHORT_TRY_ROUNDS and trial.per_second < _CLEAR_LOSS * self._rate.per_second
        if trial.rounds < _TRY_ROUNDS and not hopeless:
            return
        gain = 0.0 if hopeless else trial.per_second / max(1e-9, self._rate.per_second)
        self._try = None
        if gain > _GAIN:
            self._rate, self._patience = trial, _PATIENCE
        else:
            self._switch()
            self._patience = min(2 * self._patience, _MAX_PATIENCE)
        self._next_try = self._patience

    def _switch(self) -> None:
        self.in_turns, self._settling = not self.in_turns, _SETTLING_ROUNDS


@dataclass(slots=True)
class _Measured:
    """Rounds that began with a hit, by one of the two choices."""

    tokens: Mean = field(default_factory=lambda: Mean(_MEMORY))
    seconds: Mean = field(default_factory=lambda: Mean(_MEMORY))
    """Of the verification, and of the wait before it."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens.get(0.0) / max(1e-6, self.seconds.get(0.0))


@dataclass(slots=True)
class Freshness:
    """The choice at every hit of a draft that reads features.

    What a draft grew while the target verified knows no features of the tokens that were accepted meanwhile. What it
    grows after the verdict does, but the target waits for it. That pays iff

        tokens fresh / tokens cached > 1 + wait / verification,

    where tokens are those of a round. Both sides are measured: most hits take the choice that is better so far, and now
    and then one takes the other choice.
    """

    _FIRST_PAUSE: ClassVar[int] = 8
    _LONGEST_PAUSE: ClassVar[int] = 256
    """Hits between two probes. Doubled whenever a series of probes has changed nothing."""
    _SERIES: ClassVar[int] = 8
    """Probes after which the other choice counts as measured."""
    _MARGIN: ClassVar[float] = 1.03
    """Gain of a change: means over few rounds vary, and nobody should change back and forth for nothing."""
    _cached: _Measured = field(default_factory=_Measured)
    _fresh: _Measured = field(default_factory=_Measured)
    _waits: bool = False
    """The choice that is better so far."""
    _pause: int = _FIRST_PAUSE
    _hits: int = 0
    """Since the last probe."""
    _probes: int = 0
    """Of the present series."""

    def choose(self) -> bool:
        """At a hit: whether to drop the cached guesses and wait for fresh ones."""
        self._hits += 1
        if self._hits < self._pause:
            return self._waits
        self._hits, self._probes = 0, self._probes + 1
        return not self._waits

    def observe(self, fresh: bool, tokens: int, seconds: float) -> None:
        """A round that began with a hit gave `tokens`; the wait and the verification took `seconds`."""
        measured = self._fresh if fresh else self._cached
        measured.tokens.observe(tokens)
        measured.seconds.observe(seconds)
        if self._probes >= self._SERIES:
            self._decide()

    def _decide(self) -> None:
        """After a series of probes."""
        chosen, other = (self._fresh, self._cached) if self._waits else (self._cached, self._fresh)
        changes = other.rate > self._MARGIN * chosen.rate
        self._probes = 0
        self._waits ^= changes
        self._pause = self._FIRST_PAUSE if changes else min(2 * self._pause, self._LONGEST_PAUSE)


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

    def expect_target(self, costs: Sequence[MeasuredCost]) -> None:
        """A target with these measured costs has come up."""
        for cost in (self.beside_draft, self.beside_resting_draft):
            cost.expect(costs)


def _likelihood_slope(fan: int, exponent: float, hits: float, misses: float) -> float:
    miss = fan**-exponent
    return math.log(fan) * (hits * miss / (1.0 - miss) - misses)
