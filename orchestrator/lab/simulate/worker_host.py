"""A virtual clock, wires that carry messages, units of work that slow each other down, and hosts that run simulated
workers behind wires. Imports no MLX; random by seed."""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from msgspec import structs

from orchestrator.lab.simulate.devices import Wire
from protocol.messages.base import Role
from protocol.messages.worker import FromWorker, Grow, Hello, ToWorker, Verdict


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
        """`key` names this direction."""
        self._clock = clock
        self.wire = wire
        self._key = key
        self._clear_at = 0.0
        """No message arrives before one that was sent earlier."""

    def send(self, at: float, deliver: Callable[[], None]) -> None:
        """Deliver a message that is sent at `at`."""
        self._clear_at = max(self._clear_at, at + self.wire.delay)
        self._clock.at(self._clear_at, deliver)


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


class Work(NamedTuple):
    """The worker is busy for `seconds`, if nothing slows it down, then it sends its replies."""

    replies: tuple[FromWorker, ...] = ()
    seconds: float = 0.0

    def lasting(self, seconds: float) -> "Work":
        """The same work that took `seconds`, as its replies then report."""
        return Work(tuple(_reporting(reply, self.seconds, seconds) for reply in self.replies), seconds)


def _reporting(reply: FromWorker, planned: float, seconds: float) -> FromWorker:
    """A repeated verdict keeps the seconds of its own forward."""
    if isinstance(reply, Verdict | Grow) and reply.seconds == planned:
        return structs.replace(reply, seconds=seconds)
    return reply


class SimulatedWorker(Protocol):
    """Messages in, work out; without a clock."""

    hello: Hello

    def handle(self, message: ToWorker) -> Work: ...

    def work(self) -> Work | None:
        """One unit of background work; None if there is none."""
        ...


BuildWorker: TypeAlias = Callable[[Role], SimulatedWorker]
"""Makes a worker for a new life."""


class WorkerHost:
    """One life of a worker: handles the messages, does one unit of work, repeats, like a real worker's loop."""

    direction = WireDirection

    def __init__(
        self,
        worker: SimulatedWorker,
        incarnation: int,
        clock: VirtualClock,
        wire: Wire,
        seed: int,
        receive: Callable[[FromWorker], None],
        contention: Contention | None = None,
    ) -> None:
        """`seed` names the wire; `receive` gets the messages that arrive at the orchestrator; `contention`
        is that of the worker's chip, None for a chip of its own."""
        self.worker = worker
        self.role: Role = worker.hello.role
        self.incarnation = incarnation
        self.alive = True
        """A dead worker sends nothing; messages that it sent before still arrive."""
        self.is_up = False
        """The orchestrator knows that it is up."""
        self._clock = clock
        self._contention = contention or Contention(clock)
        self._reply_to = receive
        self._inbox: deque[ToWorker] = deque()
        self._busy = False
        self._outbound = self.direction(clock, wire, seed, incarnation, 0)
        self._inbound = self.direction(clock, wire, seed, incarnation, 1)

    def send(self, message: ToWorker) -> None:
        self._outbound.send(self._clock.now, lambda: self._receive(message))

    def _receive(self, message: ToWorker) -> None:
        self._inbox.append(message)
        self._continue()

    def _continue(self) -> None:
        while self.alive and not self._busy:
            work = self.worker.handle(self._inbox.popleft()) if self._inbox else self.worker.work()
            if work is None:
                return
            if work.seconds > 0.0:
                self._busy = True
                self._contention.begin(work.seconds, lambda seconds, work=work: self._done(work.lasting(seconds)))
            else:
                self._reply(work)

    def _done(self, work: Work) -> None:
        self._busy = False
        self._reply(work)
        self._continue()

    def _reply(self, work: Work) -> None:
        if self.alive:
            for reply in work.replies:
                self._inbound.send(self._clock.now, lambda reply=reply: self._reply_to(reply))
