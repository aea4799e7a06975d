"""What is measured of a draft with the target: times, how often guesses are right, and the choices that follow. Pure.

`Estimates` has all of it. The meter updates it, and strategies read it. `Tries` is the mechanism of choices: it
measures the usual way and another one, keeps the other one if it is better, and doubles the pause before the next try
if it is not.
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

from orchestrator.core.expected_rate import Expected
from orchestrator.core.tuning import TUNING, Terms
from protocol.messages.worker import Hello
from protocol.speculation.token_tree import Calibration, Node

_MAX_GROWTH_TIMEOUT = 2.0
"""Seconds, whatever time a draft claims for its steps."""


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
      the prior (another clock, a busy device) and shifts it (a fixed time a forward). b is pulled to m / p̄, which is a
      pure scale: strongly by a measured prior, weakly without one.
    * r(w) is the running mean of observed cost relative to that line at this width, shrunk to 1 while it has few
      observations.
    """

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

    @property
    def reach(self) -> float:
        """The widest forward whose cost can be told: without measurements, of twice as many tokens as were observed and
        one more. Each token may cost ten times what the prior says: on a processor, behind a long context."""
        return math.inf if self._measured else 1 + 2 * max(self._ratios, default=1)

    @property
    def narrow_due(self) -> bool:
        """Forwards over one token have become so rare that the line no longer tells what they cost."""
        known = self._ratios[1].count if 1 in self._ratios else 0
        return self._since_narrow >= (TUNING.narrow_soon if known < TUNING.narrow_few else TUNING.narrow_later)

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

    def observe(self, width: int, seconds: float) -> None:
        """A forward of `width` tokens took `seconds`; an outlier counts as three times the estimate."""
        seconds = max(_LEAST_SECONDS, seconds)
        if self._measured or self._weight > 3.0:
            seconds = min(seconds, TUNING.cost_outlier * self(width))
        decay, prior = TUNING.cost_decay, self._prior_of(width)
        self._weight = decay * self._weight + 1.0
        self._prior = decay * self._prior + prior
        self._seconds = decay * self._seconds + seconds
        self._prior_squared = decay * self._prior_squared + prior * prior
        self._product = decay * self._product + prior * seconds
        self._since_narrow = 0 if width == 1 else self._since_narrow + 1
        self._fit()
        line = self._line(width)
        self._ratios.setdefault(width, Mean(window=TUNING.cost_window)).observe(seconds / line if line > 0.0 else 1.0)
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
        count = min(ratio.count, TUNING.cost_window)
        return line * max(0.5, 1.0 + count / (count + TUNING.cost_shrinkage) * (ratio.get(1.0) - 1.0))

    def _prior_of(self, width: int) -> float:
        """p(w)."""
        if not self._measured:
            return 1.0 + TUNING.prior_slope * (width - 1)
        index = bisect_left(self._widths, width)
        if index < len(self._widths):
            return self._measured[index]
        widest, highest = self._widths[-1], self._measured[-1]
        if widest == self._widths[0]:
            return highest + TUNING.prior_slope * (width - widest)
        return highest + max(0.0, highest - self._measured[0]) / (widest - self._widths[0]) * (width - widest)

    def _fit(self) -> None:
        mean_prior = self._mean_prior = self._prior / self._weight
        mean_seconds = self._mean_seconds = self._seconds / self._weight
        spread = self._prior_squared - self._weight * mean_prior**2
        covariance = self._product - self._weight * mean_prior * mean_seconds
        trust = TUNING.measured_weight if self._measured else TUNING.assumed_weight * TUNING.prior_slope**2
        self._slope = max(0.0, (covariance + trust * mean_seconds / mean_prior) / (spread + trust))

    def _line(self, width: int) -> float:
        line = self._mean_seconds + self._slope * (self._prior_of(width) - self._mean_prior)
        return max(0.2 * self._mean_seconds, line)


# How often guesses are right ----------------------------------------------------------------------


@dataclass(slots=True)
class HitModel:
    """The exponent r of 1 - p_hit(F) = F^-r (arXiv 2603.03251), by maximum token_logprob over decayed counts."""

    _hits: dict[int, float] = field(default_factory=dict)
    _misses: dict[int, float] = field(default_factory=dict)

    def observe(self, fan: int, hit: bool) -> None:
        """The bonus token was (not) among `fan` guesses. A single guess is no evidence about r."""
        if fan < 2:
            return
        for counts in (self._hits, self._misses):
            for key in counts:
                counts[key] *= TUNING.hits_decay
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
        """Derivative of the log token_logprob by r."""
        prior_miss = 4.0 ** (-TUNING.hits_exponent)
        slope = _likelihood_slope(4, exponent, 4 * (1 - prior_miss), 4 * prior_miss)
        for fan in self._hits.keys() | self._misses.keys():
            slope += _likelihood_slope(fan, exponent, self._hits.get(fan, 0.0), self._misses.get(fan, 0.0))
        return slope


@dataclass(slots=True)
class GuessRanks:
    """How often the target chooses a draft's guess behind an accepted node, by the rank of the guess."""

    _means: list[Mean] = field(
        default_factory=lambda: [Mean(TUNING.guesses_window, share, TUNING.ranks_weight) for share in TUNING.ranks]
    )

    def observe(self, guesses: int, chosen: int | None) -> None:
        """A node had so many guesses; the target chose the one of this rank, or none of them."""
        for rank, mean in enumerate(self._means[:guesses]):
            mean.observe(float(rank == chosen))

    @property
    def all(self) -> float:
        """The share of all guesses together, at most 1."""
        return min(1.0, sum(self.shares(len(self._means))))

    def shares(self, guesses: int) -> list[float]:
        """Of each of so many guesses, the best first; none is believed to be better than the one before it.

        The best one counts with its standard error: a few wrong guesses must not end the asking that would correct it.
        """
        best, *others = (mean.get(0.0) for mean in self._means[:guesses])
        error = math.sqrt(best * (1.0 - best) / self._means[0].count)
        return list(accumulate((best + error, *others), min))


def _likelihood_slope(fan: int, exponent: float, hits: float, misses: float) -> float:
    miss = fan**-exponent
    return math.log(fan) * (hits * miss / (1.0 - miss) - misses)


# Choices between two ways -------------------------------------------------------------------------


@dataclass(slots=True)
class Pause:
    """Rounds until something is tried again: `first`, twice as many after each try that failed, at most `longest`."""

    first: int
    longest: int
    rounds: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """A try has succeeded."""
        self.rounds = self.first

    def double(self) -> None:
        """A try has failed."""
        self.rounds = min(2 * self.rounds, self.longest)


class Rate:
    """Tokens a second, over a decaying window of rounds."""

    def __init__(self, window: int) -> None:
        self._tokens, self._seconds = Mean(window), Mean(window)

    @property
    def rounds(self) -> int:
        return self._tokens.count

    def add(self, tokens: float, seconds: float) -> None:
        self._tokens.observe(tokens)
        self._seconds.observe(min(seconds, TUNING.outlier_rounds * self._seconds.get(math.inf)))

    @property
    def per_second(self) -> float:
        return self._tokens.get(0.0) / max(1e-9, self._seconds.get(0.0))


class Outcome(NamedTuple):
    """The end of a try."""

    kept: bool
    """The other way has become the usual one."""
    usual: float
    """Tokens a second by the way that was the usual one."""
    tried: float
    """Tokens a second by the other way."""


class Tries:
    """Measures the usual way, and the other one while it is tried."""

    def __init__(self, terms: Terms, way: bool = False) -> None:
        """`way`: the usual one."""
        self.way = way
        """What to do now."""
        self._terms = terms
        self._pause = Pause(terms.first_pause, terms.longest_pause)
        self._usual = way
        self._rates = {each: self._unmeasured() for each in (False, True)}
        self._rounds = 0
        """Since the way has changed."""
        self._tried: Counter[Hashable] = Counter()
        """Rounds of the present try, by their kind."""
        self._settling = 0

    @property
    def trying(self) -> bool:
        """The other way has its turn."""
        return self.way != self._usual

    @property
    def settling(self) -> bool:
        """The next round counts for neither way."""
        return self._settling > 0

    @property
    def due(self) -> bool:
        """The pause is over."""
        return not self.trying and self._rounds >= self._pause.rounds

    def measured(self, kind: Hashable) -> bool:
        """The usual way was measured in as many rounds of this kind as a try has."""
        return self._rates[self._usual][kind].rounds >= self._terms.rounds

    def begin(self) -> None:
        """Try the other way from the next round on."""
        if not self._tried and self._terms.window <= self._terms.rounds:
            self._rates[not self._usual] = self._unmeasured()
        self._change()

    def observe(
        self, tokens: float, seconds: float, kind: Hashable = None, way: bool | None = None, hopeless: bool = False
    ) -> Outcome | None:
        """A round gave `tokens` and took `seconds`. Returns how the present try ended, if it did with this round.

        `kind`: rounds of different kinds are not compared with one another. `way`: of this round, if it was not the
        present one. `hopeless`: whatever the rates say, the other way will not do.
        """
        way = self.way if way is None else way
        if self._settling:
            self._settling -= 1
            return None
        self._rates[way][kind].add(tokens, seconds)
        if way != self.way:
            return None
        self._rounds += 1
        return self._judge(kind, hopeless) if self.trying else None

    def failed(self) -> None:
        """What would have been tried is known to be slower."""
        self._pause.double()
        self._rounds = 0

    def restart(self) -> None:
        """One of the two ways is another one now: the usual way is what is done at present, and nothing is measured."""
        self._usual = self.way
        self._rates = {each: self._unmeasured() for each in (False, True)}
        self._tried.clear()
        self._rounds, self._settling = 0, self._terms.settling

    def _judge(self, kind: Hashable, hopeless: bool) -> Outcome | None:
        terms, usual, tried = self._terms, self._rates[self._usual][kind], self._rates[self.way][kind]
        self._tried[kind] += 1
        known = usual.rounds >= terms.few
        clear = known and tried.rounds >= terms.few and tried.per_second < terms.loss * usual.per_second
        late = self._tried.total() >= terms.most
        if hopeless or clear or late or (known and self._tried[kind] >= terms.rounds):
            kept = known and not hopeless and not clear and tried.per_second > terms.gain * usual.per_second
            self._end(kept)
            return Outcome(kept, usual.per_second, tried.per_second)
        if self._rounds >= terms.in_a_row:
            self._change()
        return None

    def _end(self, kept: bool) -> None:
        self._tried.clear()
        if kept:
            self._usual = self.way
            self._pause.reset()
            self._rounds = 0
        else:
            self._change()
            self._pause.double()

    def _change(self) -> None:
        self.way = not self.way
        self._rounds, self._settling = 0, self._terms.settling

    def _unmeasured(self) -> defaultdict[Hashable, Rate]:
        return defaultdict(lambda: Rate(self._terms.window))


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
    waited: float = 0.0
    """Seconds that the target waited for growth."""

    @property
    def overhead(self) -> float:
        """Seconds beyond the target's forward and the wait for growth."""
        return max(0.0, self.seconds - self.waited - self.forward)


class TurnTaking:
    """Where draft and target compute: apart, at the same time, or on one device, in turns.

    On one GPU, or on few cores, a draft that grows the tree during a forward slows the target down. In turns it grows
    only while the target waits for it. The hardware decides first; measurement may overrule it.

    A round counts with the tokens that were expected of it, 1 + the sum of its nodes' path probabilities: these vary
    less than the tokens that came, and both modes expect alike.
    """

    def __init__(self, in_turns: bool = False, fixed: bool = False) -> None:
        """`in_turns`: what the hardware suggests. `fixed`: the user chose it, so the other mode is never tried."""
        self._fixed = fixed
        self._tries = Tries(TUNING.turns, in_turns)
        self._saved = Mean()
        """Seconds by which forwards were shorter in the present try."""

    @property
    def in_turns(self) -> bool:
        """The present mode: the draft rests until it is asked for a step."""
        return self._tries.way

    @property
    def settled(self) -> bool:
        """No other mode is tried."""
        return not self._tries.trying and not self._tries.settling

    def observe(self, round: MeasuredRound, beside_draft: WidthCost, step: float, deeper: float = 1.0) -> None:
        """`beside_draft`: costs of the target's forwards while the draft grows. `step`: seconds of a growth step.
        `deeper`: tokens that a step can add to a round."""
        if self._fixed:
            return
        tries = self._tries
        if tries.trying and not tries.settling:
            self._saved.observe(beside_draft(round.width) - round.forward)
        # In turns, a round waits for a growth step at least. Less of a slow-down is not worth it.
        hopeless = self.in_turns and self._saved.count >= TUNING.turns.few and self._saved.get(0.0) < step
        tries.observe(round.tokens, round.seconds, hopeless=hopeless)
        if not tries.trying:
            self._saved = Mean()
            # In turns each step is waited for. Where a plain forward gives as much in that time, no try can pay.
            pays = self.in_turns or step < deeper * beside_draft(1)
            if tries.due and pays and round.remaining >= TUNING.long_request:
                tries.begin()


GuessedBy = Literal["nobody", "lookup", "draft"]
"""Who had a guess worth a verification below a root: behind an answer of the draft it may still have some."""


class Instead(NamedTuple):
    """What a round could have verified at once in place of asking a draft in turns."""

    guessed_by: GuessedBy
    expected: Expected


@dataclass(slots=True)
class Asked:
    """What the rounds in which a draft in turns was asked brought beside what verifying at once was expected to give:
    in tokens that came, since a draft whose claims are too low would never show what it is worth.

    That has all that follows from the answer: guesses that turn out to be improbable and are not verified, further
    steps, late responses, and forwards that take longer than the costs say.
    """

    _tokens: Mean = field(default_factory=lambda: Mean(TUNING.asked_rounds))
    _squares: Mean = field(default_factory=lambda: Mean(TUNING.asked_rounds))
    _seconds: Mean = field(default_factory=lambda: Mean(TUNING.asked_rounds))

    @property
    def known(self) -> bool:
        return self._tokens.count >= TUNING.asked_known

    def observe(self, brought: int, seconds: float, instead: Expected) -> None:
        """A round brought so many tokens. `instead`: what was expected of verifying at once."""
        tokens = brought - instead.tokens
        self._tokens.observe(tokens)
        self._squares.observe(tokens * tokens)
        self._seconds.observe(min(seconds - instead.seconds, TUNING.outlier_rounds * instead.seconds))

    def surplus(self, usual: float, errors: float = TUNING.asked_errors) -> float:
        """Tokens beyond those of the usual rate in the same time, and so many standard errors: a few rounds must not
        end the asking that would correct them."""
        tokens = self._tokens.get(0.0)
        variance = max(0.0, self._squares.get(0.0) - tokens * tokens)
        # A running mean over n rounds is as certain as one of 2n rounds that count alike.
        error = math.sqrt(variance / max(1, min(self._tokens.count, 2 * TUNING.asked_rounds)))
        return tokens + errors * error - usual * self._seconds.get(0.0)


class Freshness:
    """The choice at every hit of a draft that reads features.

    What a draft grew while the target verified knows no features of the tokens that were accepted meanwhile. What it
    grows after the verdict does, but the target waits for it. That pays iff

        tokens fresh / tokens cached > 1 + wait / verification,

    where tokens are those of a round. Both sides are measured, by single hits with pauses between them.
    """

    def __init__(self) -> None:
        self._tries = Tries(TUNING.freshness)

    def choose(self) -> bool:
        """At a hit: whether to drop the cached guesses and wait for fresh ones."""
        return self._tries.way

    def observe(self, fresh: bool, tokens: int, seconds: float) -> None:
        """A round that began with a hit gave `tokens`; the wait and the verification took `seconds`."""
        self._tries.observe(tokens, seconds, way=fresh)
        if self._tries.due:
            self._tries.begin()


@dataclass(slots=True)
class DraftGate:
    """Pauses a draft that does not pay: its work only takes memory bandwidth from the target.

    Either it never guesses right, or plain decoding is faster, because its guesses come too late or are too few. Every
    round of a draft beside the target is compared with plain decoding, in tokens: those expected of the round, less
    those of plain decoding in the same time. When the loss is certain, the draft rests until it is a small share of
    what was generated meanwhile; then it is tried again. So a long prompt, whose reading costs most, is read seldom.
    """

    _wrong_rounds: int = 0
    """In a row."""
    _pause: Pause = field(default_factory=lambda: Pause(TUNING.wrong_rounds, TUNING.most_wrong_rounds))
    _paused_rounds: int = 0
    """Rounds until the present pause ends; 0 if the draft is not paused."""
    _plain: Rate = field(default_factory=lambda: Rate(window=32))
    """Of plain decoding beside a resting draft."""
    _measuring_rounds: int = 0
    """Rounds until plain decoding is measured."""
    _gained: float = 0.0
    """Tokens since the last pause."""
    _spread: Mean = field(default_factory=lambda: Mean(window=128, value=0.1, count=16))
    """Square of a round's gain."""
    _unread: tuple[float, float] = (0.0, 0.0)
    """Tokens and seconds of the rounds of this request before the draft had read the prompt; a second counts as many
    times as lookup alone was expected to be faster than plain decoding."""

    @property
    def paused(self) -> bool:
        """The draft serves no request."""
        return self._paused_rounds > 0

    @property
    def measuring(self) -> bool:
        """The draft rests, so that plain decoding is measured."""
        return self._measuring_rounds > 0

    def observe(self, guessed: bool | None) -> None:
        """A round ended; `guessed`: the target's next token was among the guesses, None if there were none."""
        if self._paused_rounds:
            self._paused_rounds -= 1
        elif guessed:
            self._wrong_rounds = 0
            self._pause.reset()
        elif guessed is not None:
            self._wrong_rounds += 1
            if self._wrong_rounds >= TUNING.wrong_rounds:
                self._rest(self._pause.rounds)
                self._pause.double()

    def observe_gain(self, tokens: float, seconds: float, reads: bool, plain: float, lookup: float) -> None:
        """A lone request's round of `tokens` expected tokens, whose draft rested or grew beside the target.

        `reads`: the draft has not read the prompt yet, so that nothing can be said of it. `plain`: tokens a second of
        plain decoding beside a draft that grows. `lookup`: as many times that rate are expected of this round with the
        guesses of prompt lookup alone.
        """
        if self.paused:
            self._plain.add(tokens / lookup, seconds)
        elif self.measuring and not reads:
            self._measuring_rounds -= 1
            if self._measuring_rounds < TUNING.plain_measured:
                self._plain.add(tokens / lookup, seconds)
        elif reads:
            self._unread = self._unread[0] + tokens, self._unread[1] + lookup * seconds
        else:
            plain = self._plain.per_second if self._known else TUNING.assumed_gain * plain
            gain = max(-TUNING.most_lost, tokens - plain * lookup * seconds)
            self._gained = min(TUNING.credit, self._gained + gain)
            self._spread.observe(gain * gain)
            if self._is_lost and self._known:
                self._gained -= self._lost_by_reading
                self._rest_unpaid()
            elif self._is_lost:
                self._measuring_rounds, self._gained = TUNING.plain_measured + TUNING.plain_settling, 0.0

    def request_ended(self) -> None:
        """Short answers may not be worth the reading of their prompts."""
        self._gained -= self._lost_by_reading
        self._unread = 0.0, 0.0
        if self._is_lost:
            self._rest_unpaid()

    @property
    def _lost_by_reading(self) -> float:
        tokens, seconds = self._unread
        assumed = (TUNING.assumed_gain - 1.0) * tokens
        return max(0.0, self._plain.per_second * seconds - tokens if self._known else assumed)

    @property
    def _is_lost(self) -> bool:
        """More tokens were lost than by chance, or than may be believed without a measurement."""
        certain = TUNING.certain_loss + TUNING.certain_spread * self._spread.get(0.0)
        return self._gained < -(certain if self._known else TUNING.doubtful_loss)

    def _rest_unpaid(self) -> None:
        self._rest(int(-TUNING.spared_rounds * self._gained) if self._known else TUNING.wrong_rounds)

    @property
    def _known(self) -> bool:
        return self._plain.rounds >= TUNING.plain_measured

    def _rest(self, rounds: int) -> None:
        self._paused_rounds, self._measuring_rounds, self._wrong_rounds = rounds, 0, 0
        self._gained, self._unread = 0.0, (0.0, 0.0)


# All of it ----------------------------------------------------------------------------------------


class GrowthStep(NamedTuple):
    """What one growth says of its draft's speed. All times are seconds."""

    nodes: int
    """That the step evaluated."""
    seconds: float
    """Of the step."""
    response: float | None
    """Since the draft was asked, if that was the last step that it was asked for."""
    first: bool
    """It is the first step below its root."""
    read: tuple[int, float] | None
    """Tokens that the draft read before this step, and the time that took; None if it had read them before."""
    recovery: float | None
    """From a miss to this first growth below the new root."""


class ChosenNode(NamedTuple):
    """A node on the path that the target chose."""

    node: Node
    guesses: int
    """Children that the draft had given it."""
    token: int
    """That the target chose behind it."""


@dataclass(slots=True)
class Estimates:
    """Measurements of one draft with the target, for all requests that are sampled, or for all greedy ones."""

    beside_draft: WidthCost = field(default_factory=WidthCost)
    """Of the target's forwards while the draft grows."""
    beside_resting_draft: WidthCost = field(default_factory=WidthCost)
    turns: TurnTaking = field(default_factory=TurnTaking)
    """Shared by greedy and sampled requests."""
    hop: Mean = field(default_factory=Mean)
    """Seconds of a round that are neither the target's forward nor deliberate waiting."""
    block: int = 1
    """Growth steps behind one another that one forward of the draft serves: inside a block they cost nothing."""
    step: Mean = field(default_factory=Mean)
    """Seconds of one growth step that runs a forward."""
    slowest_step: float = 0.0
    """Seconds of the slowest of recent steps: a block drafter's take a forward, or none."""
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
    asked: dict[GuessedBy, Asked] = field(default_factory=lambda: {by: Asked() for by in get_args(GuessedBy)})
    """Where nobody had a guess, those of prompt lookup behind the draft's don't count: they would have come in the next
    round. Each of the draft's saves a plain round."""
    usual: Rate = field(default_factory=lambda: Rate(TUNING.usual_rounds))
    """Of the last rounds of lone requests."""
    unasked: int = 0
    """Rounds since a draft that drafts in turns was last asked for a step."""
    calibration: Calibration = field(default_factory=Calibration)
    """Of the draft's claims."""
    lookup: Calibration = field(default_factory=Calibration)
    """Of the claims of prompt lookup, by their place in the chain: what has begun to repeat itself mostly goes on."""
    acceptance: Mean = field(default_factory=lambda: Mean(TUNING.guesses_window, TUNING.acceptance, 8))
    """a: the draft's main child of an accepted node is the target's choice. Begins as eight observations of 0.6."""
    ranks: GuessRanks = field(default_factory=GuessRanks)
    hits: HitModel = field(default_factory=HitModel)
    gate: DraftGate = field(default_factory=DraftGate)
    freshness: Freshness | None = None
    """None for a draft that reads tokens alone."""
    longest: float = math.inf
    """Tokens of context up to which the target's costs hold."""

    @property
    def target(self) -> WidthCost:
        """Of the target's forwards in the present mode."""
        return self.beside_resting_draft if self.turns.in_turns else self.beside_draft

    @property
    def usual_rate(self) -> float:
        """Tokens a second of the last rounds, at least those of plain decoding."""
        plain = self.plain_rate
        return max(plain, self.usual.per_second) if self.usual.rounds >= TUNING.usual_known else plain

    @property
    def plain_rate(self) -> float:
        """Tokens a second of plain decoding."""
        return 1.0 / (self.target(1) + self.hop.get(0.0))

    @property
    def saved_by_asking(self) -> float | None:
        """Seconds that asking a draft in turns saves in a round, as measured; None until it is. A prompt that is read
        in vain costs more than a question, so it is believed less."""
        rates = {"nobody": self.plain_rate, "lookup": self.usual_rate, "draft": self.usual_rate}
        known = [each.surplus(rates[by], 0.25) / rates[by] for by, each in self.asked.items() if each.known]
        return max(0.0, *known) if known else None

    @property
    def slowdown(self) -> float:
        """By how much of its time a growing draft prolongs a forward; 0 until both modes were measured."""
        beside, resting = self.beside_draft, self.beside_resting_draft
        return max(0.0, beside(1) / resting(1) - 1.0) if beside.observed and resting.observed else 0.0

    @property
    def growth_timeout(self) -> float:
        """Seconds after which growth that is due is not waited for any more."""
        return min(_MAX_GROWTH_TIMEOUT, max(TUNING.growth_wait, TUNING.growth_wait_steps * self.step.get(0.0)))

    def with_another_draft(self, turns: TurnTaking, claims: Calibration) -> "Estimates":
        """Estimates of another draft with the same target: the target's part is shared, the draft's is empty but for
        what is believed of its `claims`."""
        return Estimates(
            turns=turns,
            calibration=claims,
            beside_draft=self.beside_draft,
            beside_resting_draft=self.beside_resting_draft,
            hop=self.hop,
            lookup=self.lookup,
        )

    def with_costs_of(self, other: "Estimates") -> "Estimates":
        """These estimates of the draft, and the target's costs of `other`: all are shared."""
        return replace(self, beside_draft=other.beside_draft, beside_resting_draft=other.beside_resting_draft)

    def observe_guesses(self, path: Sequence[ChosenNode], unasked: bool) -> None:
        """The target has chosen this path from the root on, and its tree still is as it was. `unasked`: the draft rests
        until it is asked below the new root."""
        self.unasked += unasked
        self.gate.observe(path[0].token in path[0].node.children if path[0].guesses else None)
        for node, guesses, token in path:
            if guesses:
                rank = next((rank for rank, guess in enumerate(node.children) if guess == token), None)
                self.acceptance.observe(float(rank == 0))
                self.ranks.observe(guesses, rank)

    def observe_growth(self, step: GrowthStep) -> None:
        """The draft has ended a growth step."""
        if step.response is not None:
            (self.first_response if step.first else self.next_response).observe(step.response)
        if self.block == 1 or step.seconds > TUNING.inside_block * self.slowest_step:
            self.step.observe(step.seconds)
            self.growth.observe(step.nodes, step.seconds)
        self.slowest_step = max(step.seconds, TUNING.slowest_fading * self.slowest_step)
        if step.read is not None and step.read[0] >= TUNING.min_measured_prefill:
            self.prefill.observe(step.read[1] / step.read[0])
        if step.recovery is not None:
            self.recovery.observe(step.recovery)

    def expect_target(self, costs: Sequence[MeasuredCost]) -> None:
        """A target with these measured costs has come up."""
        for cost in (self.beside_draft, self.beside_resting_draft):
            cost.expect(costs)

    def expect_draft(self, hello: Hello) -> None:
        """A new life of this draft has come up."""
        self.growth.expect(hello.costs)
        self.block = hello.block
        if hello.features is not None:
            self.freshness = self.freshness or Freshness()
