"""The interface of modelled workers, and the host that runs one on the virtual clock behind a wire. Pure."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from orchestrator.tools.simulate.devices import Wire
from orchestrator.tools.simulate.language import VOCABULARY
from orchestrator.tools.simulate.virtual_clock import VirtualClock, WireDirection
from protocol.messages.base import Role
from protocol.messages.worker import FromWorker, Hello, ToWorker

CHUNK = 512
"""Prompt tokens of one prefill forward; messages are read in between."""
CONTEXT = 1 << 17
_RETRY_SECONDS = 1.0
"""After this long a frozen host looks again whether it may finish a unit of work."""


class Work(NamedTuple):
    """The worker is busy for `seconds`, then its replies leave."""

    replies: tuple[FromWorker, ...] = ()
    seconds: float = 0.0


class ModelledWorker(Protocol):
    """Messages in, work out; knows no time of day."""

    hello: Hello

    def handle(self, message: ToWorker) -> Work: ...

    def work(self) -> Work | None:
        """One unit of what it does unasked; None if there is nothing to do."""
        ...


def modelled_hello(role: Role, context: int = CONTEXT) -> Hello:
    return Hello(
        role=role,
        engine="modelled",
        model=f"modelled-{role}",
        architecture="none",
        vocabulary=VOCABULARY,
        context=context,
        tokenizer_fingerprint="",
        device="none",
        pid=1,
    )


class WorkerHost:
    """One life of a worker: handles what has arrived, does one unit of work, repeats, as a real worker's loop does."""

    def __init__(
        self,
        worker: ModelledWorker,
        incarnation: int,
        clock: VirtualClock,
        wire: Wire,
        seed: int,
        heard: Callable[[FromWorker], None],
    ) -> None:
        """`seed` decides what the wire does to messages; `heard` receives those that arrive at the orchestrator."""
        self.worker = worker
        self.role: Role = worker.hello.role
        self.incarnation = incarnation
        self.alive = True
        """A dead worker says nothing more; what it had sent still arrives."""
        self.up = False
        """The orchestrator was told of it."""
        self._clock = clock
        self._heard = heard
        self._inbox: deque[ToWorker] = deque()
        self._busy = False
        self._frozen = False
        self._there = WireDirection(clock, wire, seed, incarnation, 0)
        self._back = WireDirection(clock, wire, seed, incarnation, 1)

    def tell(self, message: ToWorker) -> None:
        self._there.send(self._clock.now, lambda: self._hear(message))

    def rewire(self, wire: Wire) -> None:
        """Send messages over another wire from now on."""
        self._there.wire = self._back.wire = wire

    def freeze(self) -> None:
        """Stop in the middle of a unit of work; messages queue up."""
        self._frozen = True

    def thaw(self) -> None:
        """Go on where it stopped."""
        self._frozen = False
        self._go_on()

    def _hear(self, message: ToWorker) -> None:
        self._inbox.append(message)
        self._go_on()

    def _go_on(self) -> None:
        while self.alive and not self._busy and not self._frozen:
            work = self.worker.handle(self._inbox.popleft()) if self._inbox else self.worker.work()
            if work is None:
                return
            if work.seconds > 0.0:
                self._busy = True
                self._clock.at(self._clock.now + work.seconds, lambda work=work: self._done(work))
            else:
                self._reply(work)

    def _done(self, work: Work) -> None:
        if self._frozen and self.alive:
            self._clock.at(self._clock.now + _RETRY_SECONDS, lambda: self._done(work))
            return
        self._busy = False
        self._reply(work)
        self._go_on()

    def _reply(self, work: Work) -> None:
        if self.alive:
            for reply in work.replies:
                self._back.send(self._clock.now, lambda reply=reply: self._heard(reply))
