"""One modelled worker at the end of its wire: what it hears queues up, what it does takes time. Pure."""

from collections import deque
from collections.abc import Callable

from orchestrator.tools.simulate.devices import Wire
from orchestrator.tools.simulate.modelled_worker import ModelledWorker, Work
from orchestrator.tools.simulate.virtual_clock import VirtualClock, WireDirection
from protocol.messages.worker import FromWorker, ToWorker

_LOOK_AGAIN = 1.0
"""Seconds after which a unit of work that was stopped is looked at once more."""


class WorkerHost:
    """Reads what has arrived, does one unit of work, repeats, as the real worker's loop does."""

    def __init__(
        self,
        worker: ModelledWorker,
        agenda: VirtualClock,
        wire: Wire,
        key: tuple[int, int],
        heard: Callable[[FromWorker], None],
    ) -> None:
        """`key`: the simulation's seed and this worker's incarnation; `heard`: the orchestrator's end."""
        self.worker = worker
        self.incarnation = key[1]
        self.alive = True
        """A dead worker says nothing more; what it had sent still arrives."""
        self._agenda = agenda
        self._heard = heard
        self._inbox: deque[ToWorker] = deque()
        self._busy = False
        self._frozen = False
        self._there = WireDirection(agenda, wire, *key, 0)
        self._back = WireDirection(agenda, wire, *key, 1)

    def tell(self, message: ToWorker) -> None:
        self._there.send(self._agenda.now, lambda: self._hear(message))

    def rewire(self, wire: Wire) -> None:
        """What leaves from now on goes over another wire."""
        self._there.wire = self._back.wire = wire

    def freeze(self) -> None:
        """Stop in the middle of whatever it is; messages queue up."""
        self._frozen = True

    def thaw(self) -> None:
        """Go on as if nothing had been."""
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
                self._agenda.at(self._agenda.now + work.seconds, lambda work=work: self._done(work))
            else:
                self._reply(work)

    def _done(self, work: Work) -> None:
        if self._frozen and self.alive:
            self._agenda.at(self._agenda.now + _LOOK_AGAIN, lambda: self._done(work))
            return
        self._busy = False
        self._reply(work)
        self._go_on()

    def _reply(self, work: Work) -> None:
        if self.alive:
            for reply in work.replies:
                self._back.send(self._agenda.now, lambda reply=reply: self._heard(reply))
