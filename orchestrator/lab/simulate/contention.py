"""Workers of one chip that compute at the same time and slow each other down, on the virtual clock. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.lab.simulate.virtual_clock import VirtualClock

Done = Callable[[float], None]
"""Called with the seconds that a unit of work took."""


@dataclass(slots=True, eq=False)
class _Unit:
    remaining: float
    """Seconds that it still needs if nothing else computes."""
    began: float
    done: Done


class Contention:
    """Each unit of work advances at full speed while it is alone, and at 1 / `slow_down` of it beside another one."""

    def __init__(self, clock: VirtualClock, slow_down: float = 1.0) -> None:
        self._clock = clock
        self._slow_down = slow_down
        self._units: list[_Unit] = []
        self._advanced_at = 0.0
        self._changes = 0
        """Number of the present set of units: completions that were scheduled for an earlier set are void."""

    def begin(self, seconds: float, done: Done) -> None:
        """Begin a unit of work that takes `seconds` alone."""
        self._advance()
        self._units.append(_Unit(seconds, self._clock.now, done))
        self._schedule()

    def _advance(self) -> None:
        elapsed = self._clock.now - self._advanced_at
        self._advanced_at = self._clock.now
        for unit in self._units:
            unit.remaining -= elapsed / self._factor

    @property
    def _factor(self) -> float:
        """Two units slow each other down by `slow_down`, each further one by as much again."""
        return 1.0 + (self._slow_down - 1.0) * max(0, len(self._units) - 1)

    def _schedule(self) -> None:
        self._changes += 1
        if self._units:
            unit, change = min(self._units, key=lambda unit: unit.remaining), self._changes
            self._clock.at(self._clock.now + unit.remaining * self._factor, lambda: self._finish(unit, change))

    def _finish(self, unit: _Unit, change: int) -> None:
        if change != self._changes:
            return
        self._advance()
        self._units.remove(unit)
        self._schedule()
        unit.done(self._clock.now - unit.began)
