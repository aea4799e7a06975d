"""What a simulated worker is, and the host that runs one on the virtual clock behind a wire. Imports no MLX."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

from msgspec import structs

from orchestrator.lab.simulate.devices import Wire
from orchestrator.lab.simulate.virtual_clock import Contention, VirtualClock, WireDirection
from protocol.messages.base import Role
from protocol.messages.worker import FromWorker, Grow, Hello, ToWorker, Verdict

_RETRY_SECONDS = 1.0
"""Interval at which a frozen host checks whether it may finish a unit of work."""


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
        """`seed` decides the wire's faults; `receive` gets the messages that arrive at the orchestrator; `contention`
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
        self._frozen = False
        self._outbound = WireDirection(clock, wire, seed, incarnation, 0)
        self._inbound = WireDirection(clock, wire, seed, incarnation, 1)

    def send(self, message: ToWorker) -> None:
        self._outbound.send(self._clock.now, lambda: self._receive(message))

    def rewire(self, wire: Wire) -> None:
        """Send later messages over another wire."""
        self._outbound.wire = self._inbound.wire = wire

    def freeze(self) -> None:
        """Stop in the middle of a unit of work; messages queue up."""
        self._frozen = True

    def thaw(self) -> None:
        """Continue where it stopped."""
        self._frozen = False
        self._continue()

    def _receive(self, message: ToWorker) -> None:
        self._inbox.append(message)
        self._continue()

    def _continue(self) -> None:
        while self.alive and not self._busy and not self._frozen:
            work = self.worker.handle(self._inbox.popleft()) if self._inbox else self.worker.work()
            if work is None:
                return
            if work.seconds > 0.0:
                self._busy = True
                self._contention.begin(work.seconds, lambda seconds, work=work: self._done(work.lasting(seconds)))
            else:
                self._reply(work)

    def _done(self, work: Work) -> None:
        if self._frozen and self.alive:
            self._clock.at(self._clock.now + _RETRY_SECONDS, lambda: self._done(work))
            return
        self._busy = False
        self._reply(work)
        self._continue()

    def _reply(self, work: Work) -> None:
        if self.alive:
            for reply in work.replies:
                self._inbound.send(self._clock.now, lambda reply=reply: self._reply_to(reply))
