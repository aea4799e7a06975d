"""A virtual clock with its pending actions, wires that carry messages, and units of work that slow each other down.

Pure; random by seed.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.lab.simulate.devices import Wire
from orchestrator.lab.simulate.language import uniform


class VirtualClock:
    """Runs actions by due time; actions with the same time run in the order of the calls of `at`."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the simulation began."""
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (max(time, self.now), next(self._count), action))

    @property
    def next_at(self) -> float | None:
        return self._due[0][0] if self._due else None

    def advance(self) -> None:
        """Advance to the next action and run it."""
        self.now, _, action = heapq.heappop(self._due)
        action()


class WireDirection:
    """One direction of a wire."""

    def __init__(self, clock: VirtualClock, wire: Wire, *key: int) -> None:
        """`key` seeds the faults of this direction."""
        self._clock = clock
        self.wire = wire
        """May be replaced; messages under way keep their arrival times."""
        self._key = key
        self._sent = 0
        self._clear_at = 0.0
        """No message arrives before one that was sent earlier."""

    def send(self, at: float, deliver: Callable[[], None]) -> None:
        """Deliver a message that is sent at `at`, unless the wire loses it."""
        wire = self.wire
        arrival = at + wire.delay + wire.jitter * self._chance(0)
        doubled, overtaking = self._chance(-1) < wire.doubled, self._chance(-2) < wire.overtaking
        tries = 1
        while self._chance(tries) < wire.loss:
            if wire.resend is None:
                self._sent += 1
                return
            arrival += wire.resend
            tries += 1
        self._sent += 1
        if not overtaking:
            arrival = self._clear_at = max(self._clear_at, arrival)
        self._clock.at(arrival, deliver)
        if doubled:
            self._clock.at(arrival + 20 * wire.delay, deliver)

    def _chance(self, purpose: int) -> float:
        wire = self.wire
        certain = not (wire.jitter or wire.loss or wire.doubled or wire.overtaking)
        return 1.0 if certain else uniform(*self._key, self._sent, purpose)


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
