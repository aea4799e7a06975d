"""A virtual clock with its pending actions, and wires that carry messages. Pure; random by seed."""

import heapq
import itertools
from collections.abc import Callable

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
