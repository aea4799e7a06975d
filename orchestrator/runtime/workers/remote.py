"""Where workers of other machines come in, and where the pipeline's owner looks after them.

The shell around `RemoteRegistry`: one TCP socket with keys for guests, one in the session's private folder for the
owner. What it yields are events of the state machine.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import structlog
import zmq

from orchestrator.core.events import Arrived, WorkerDown, WorkerUp
from orchestrator.machine.network import reachable_host
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.runtime.workers.kv_intake import KvIntake
from orchestrator.runtime.workers.remote_registry import RemoteRegistry, RemoteWorker, without_shared_memory
from protocol.errors import InputError, PipelineError, blame_of
from protocol.messages.base import Message
from protocol.messages.client import Refused
from protocol.messages.remote import (
    Attach,
    FromGuest,
    FromOwner,
    Invitation,
    Invite,
    Join,
    Joined,
    Leave,
    Revoke,
    StatusUpdate,
    Welcome,
    WorkerEntry,
    Workers,
    WorkerStatus,
)
from protocol.messages.worker import Fault, Hello, KvBlock, KvOffer, Pong, Prefill, Shutdown, Stop, ToWorker
from protocol.security.addresses import endpoint
from protocol.security.guard import INVITATION_SECONDS, Guard
from protocol.security.keys import JoinLine, own_keys
from protocol.transport.codec import MAX_WORKER_FRAME, Stamp
from protocol.transport.hub import Arrival, Hub

_NO_LIFE = Stamp(0, 0)
log = structlog.get_logger()

WorkerEvent: TypeAlias = WorkerUp | WorkerDown | Arrived


class RemoteWorkers:
    """Admits guests by their keys, and lets a worker's message count only with the stamp that its guest was given."""

    def __init__(
        self,
        context: zmq.Context[Any],
        setup: OrchestratorSetup,
        epoch: int,
        guests: RemoteRegistry,
        roll: Callable[[], list[WorkerEntry]],
    ) -> None:
        """`roll` tells of the pipeline's own workers. Raises InputError where it can't listen."""
        assert setup.listening is not None
        folder = Path(setup.listening.folder)
        self._keys = own_keys(folder)
        self._guard = Guard(context, folder)
        self._hub = Hub(
            context, setup.listening.address, FromGuest, guard=self._guard, keys=self._keys, limit=MAX_WORKER_FRAME
        )
        self._owner = Hub(context, Session(Path(setup.session)).owner_address, FromOwner)
        self._epoch = epoch
        self._guests = guests
        self._roll = roll
        self.intake = KvIntake(epoch, setup.options.arena_memory << 20)
        self._unasked: list[Arrived] = []
        """What a prefill worker could not be asked, to be told at the next `patrol`."""
        self.stale = 0
        """Messages of admitted guests with a stamp that is not theirs, or that a guest has no business to send."""

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        return [self._guard.socket, self._hub.socket, self._owner.socket]

    def receive(self) -> Iterator[WorkerEvent]:
        """Let in who knocked; what workers said, and who is gone by the owner's word."""
        self._guard.handle(time.monotonic())
        for arrival in self._hub.receive():
            yield from self._on_guest(arrival)
        for arrival in self._owner.receive():
            yield from self._on_owner(arrival)

    def send(self, incarnation: int, message: ToWorker) -> None:
        """Send to a worker; one that can't be reached is given up at the next `patrol`."""
        worker = self._guests.get(incarnation)
        if worker is None or worker.hello is None:
            return
        if isinstance(message, Prefill):
            asked = self.intake.ask(message)
            if isinstance(asked, Fault):
                self._unasked.append(Arrived(worker.role, incarnation, asked))
                return
            message = asked
        elif isinstance(message, Stop) and worker.role == "prefill":
            self.intake.end(message.sequence)
        self._send(worker, without_shared_memory(message))

    def patrol(self) -> Iterator[WorkerEvent]:
        """Tell what could not be asked, and give up who is out of reach."""
        unasked, self._unasked = self._unasked, []
        yield from unasked
        for worker in self._guests.gone(time.monotonic()):
            yield self._part(worker, "out of reach" if worker.lost else "silent")

    def ping(self, statuses: Mapping[int, WorkerStatus]) -> None:
        """Every few seconds: ask for signs of life, and tell guests how their workers stand."""
        for worker in self._guests:
            if worker.hello is not None:
                worker.status = statuses.get(worker.incarnation, worker.status)
                self._send(worker, self._guests.ping(worker, time.perf_counter_ns()))
            heard = self._say(worker, StatusUpdate(worker.life, worker.status, worker.round_trip))
            if worker.hello is None and not heard:
                worker.lost = True

    def deadline(self) -> float | None:
        return 0.0 if self._unasked else self._guests.deadline()

    def has(self, incarnation: int) -> bool:
        return self._guests.get(incarnation) is not None

    def dismiss(self, incarnation: int, text: str) -> None:
        """This worker can't serve here, and its guest is told why; the state machine knows."""
        worker = self._guests.get(incarnation)
        if worker is not None:
            self._refuse(worker.control, InputError(text))
            self._part(worker, text)

    def give_up(self, incarnation: int, reason: str) -> Iterator[WorkerEvent]:
        """Let a worker go that answers no more; its guest may send another."""
        worker = self._guests.get(incarnation)
        if worker is not None:
            yield self._part(worker, reason)

    def close(self) -> None:
        for worker in self._guests:
            self._part(worker, "the pipeline ends")
        self._hub.close(linger=200)
        self._owner.close()
        self._guard.close()

    # Guests -----------------------------------------------------------------------------------

    def _on_guest(self, arrival: Arrival) -> Iterator[WorkerEvent]:
        now = time.monotonic()
        match arrival.message:
            case Join() as join:
                self._join(arrival, join, now)
            case Attach() as attach:
                self._attach(arrival, attach, now)
            case Leave(life):
                for worker in self._guests.of(arrival.identity):
                    if worker.life == life:
                        yield self._part(worker, "its guest took it back")
            case message:
                epoch, incarnation = arrival.stamp
                worker = self._guests.find(incarnation, arrival.identity)
                if epoch != self._epoch or worker is None:
                    self.stale += 1
                    return
                worker.heard_at = now
                yield from self._on_worker(worker, arrival.peer, message, arrival.payload)

    def _join(self, arrival: Arrival, join: Join, now: float) -> None:
        try:
            name = self._guard.redeem(arrival.identity, join.name, join.public.encode(), now)
        except PipelineError as error:
            self._refuse(arrival.peer, error)
            return
        log.info("guest joined", name=name)
        self._hub.send(arrival.peer, Joined(name), _NO_LIFE)

    def _attach(self, arrival: Arrival, attach: Attach, now: float) -> None:
        name = self._guard.name_of(arrival.identity)
        if name is None:
            self._refuse(arrival.peer, InputError("This key is not known here: join first, with a join line."))
            return
        admitted = self._guests.attach(name, arrival.identity, arrival.peer, attach, now)
        if isinstance(admitted, str):
            self._refuse(arrival.peer, PipelineError(admitted))
            return
        self._say(admitted, Welcome(attach.life, self._epoch, admitted.incarnation))

    def _on_worker(self, worker: RemoteWorker, peer: bytes, message: Message, payload: bytes) -> Iterator[WorkerEvent]:
        match message:
            case Hello() as hello:
                known = worker.hello is not None
                mismatch = self.intake.mismatch(hello) if hello.role == worker.role == "prefill" else None
                if not self._guests.introduce(worker, peer, hello):
                    self.dismiss(worker.incarnation, f"A {hello.role} worker came as the {worker.role}.")
                elif mismatch is not None:
                    self.dismiss(worker.incarnation, mismatch)
                elif not known:
                    log.info("worker up", role=hello.role, guest=worker.name, model=hello.model, device=hello.device)
                    yield WorkerUp(worker.incarnation, hello, guest=True)
                    self._probe(worker)
            case Fault(kind="fatal", text=text):
                self._refuse(worker.control, PipelineError(text or "The worker ended without a word."))
                yield self._part(worker, text)
            case Pong() as pong:
                if self._guests.pong(worker, pong, time.perf_counter_ns()):
                    self._probe(worker)
                yield Arrived(worker.role, worker.incarnation, pong)
            case _ if worker.hello is None or isinstance(message, KvOffer):
                # No worker speaks before its Hello, and names of shared memory mean nothing from elsewhere.
                self.stale += 1
            case KvBlock() as block if worker.role == "prefill":
                answer = self.intake.take(block, payload)
                if answer is not None:
                    yield Arrived(worker.role, worker.incarnation, answer)
            case KvBlock():
                self.stale += 1
            case _:
                worker.peer = peer
                yield Arrived(worker.role, worker.incarnation, message)  # pyright: ignore[reportArgumentType]

    def _probe(self, worker: RemoteWorker) -> None:
        self._send(worker, self._guests.ping(worker, time.perf_counter_ns()))

    def _part(self, worker: RemoteWorker, reason: str) -> WorkerDown:
        """Void its stamp and tell it to end."""
        if worker.hello is not None:
            self._send(worker, Shutdown())
        self._guests.drop(worker)
        if worker.role == "prefill":
            self.intake.clear()
        log.warning("worker gone", role=worker.role, guest=worker.name, reason=reason)
        return WorkerDown(worker.role, worker.incarnation)

    def _send(self, worker: RemoteWorker, message: ToWorker) -> None:
        crowded = self._hub.queue_full
        if not self._hub.send(worker.peer, message, Stamp(self._epoch, worker.incarnation)):
            # A queue that is full empties, or silence tells.
            worker.lost = worker.lost or self._hub.queue_full == crowded

    def _say(self, worker: RemoteWorker, message: Message) -> bool:
        """Tell the guest's own command."""
        return self._hub.send(worker.control, message, _NO_LIFE)

    def _refuse(self, peer: bytes, error: PipelineError) -> None:
        self._hub.send(peer, Refused("", str(error)[:4000], blame_of(error)), _NO_LIFE)

    # The owner --------------------------------------------------------------------------------

    def _on_owner(self, arrival: Arrival) -> Iterator[WorkerEvent]:
        try:
            answer: Message = self._workers()
            match arrival.message:
                case Invite():
                    answer = self._invitation()
                case Revoke(name):
                    identity = self._guard.revoke(name)
                    for worker in self._guests.of(identity):
                        text = "The owner of that pipeline has sent this machine away: ask for a new join line."
                        self._refuse(worker.control, InputError(text))
                        yield self._part(worker, "revoked")
                    answer = self._workers()
                case _:
                    pass
        except PipelineError as error:
            answer = Refused("", str(error)[:4000], blame_of(error))
        self._owner.send(arrival.peer, answer, arrival.stamp)

    def _invitation(self) -> Invitation:
        secret = self._guard.invite(time.monotonic())
        bound = endpoint(self._hub.address)
        assert bound is not None
        line = JoinLine(reachable_host(bound), bound.port, self._keys.public, secret)
        return Invitation(str(line), INVITATION_SECONDS)

    def _workers(self) -> Workers:
        entries = [*self._roll(), *(worker.entry() for worker in self._guests)]
        here = {entry.name for entry in entries}
        away = [WorkerEntry(name=name, role=None, status="gone") for name in self._guard.pinned if name not in here]
        return Workers((*entries, *away))
