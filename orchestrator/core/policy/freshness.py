"""Whether a hit is given up for guesses that know the target's latest features. Pure; updated by events.

What a draft grew while the target verified knows no features of the tokens that were accepted meanwhile. What it grows
after the verdict does, but the target waits for it. That pays iff

    tokens fresh / tokens cached > 1 + wait / verification,

where tokens are those of a round. Both sides are measured: most hits take the choice that is better so far, and now and
then one takes the other choice.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from orchestrator.core.policy.mean import Mean

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
    """The choice at every hit of a draft that reads features."""

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
