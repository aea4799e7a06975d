"""Two choices that are tried both ways while requests run, of which the faster way is kept. Pure; updated by events.

`TurnTaking`: draft and target compute apart, at the same time, or on one device, in turns. `Freshness`: a hit verifies
the cached guesses, or is given up for guesses that know the target's latest features.
"""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from orchestrator.core.policy.running_means import Mean, WidthCost

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


_MEMORY = 64


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
