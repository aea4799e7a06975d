"""Remote workers, and the commands of the pipeline's owner about them.

The shell around `RemoteRegistry`: one TCP socket with keys for other machines, and one in the session's private folder
for the owner. Yields events of the state machine.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import zmq

from orchestrator.core.events import Arrived, WorkerDown, WorkerUp
from orchestrator.machine.network import reachable_host
from orchestrator.runtime.guard import INVITATION_SECONDS, Guard
from orchestrator.runtime.hub import Arrival, Hub
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.runtime.workers.intake import FeatureIntake, KvIntake
from orchestrator.runtime.workers.remote_registry import LineLimit, RemoteRegistry, RemoteWorker
from protocol.errors import InputError, PipelineError, blame_of
from protocol.features.outlet import FeatureOutlet
from protocol.messages.base import Message, RequestId
from protocol.messages.client import Refused
from protocol.messages.features import (
    FeatureBlock,
    Features,
    FeaturesTaken,
    Tap,
)
from protocol.messages.kv import KvOffer
from protocol.messages.remote import (
    Attach,
    FromOwner,
    FromRemote,
    Invitation,
    Invite,
    Join,
    Joined,
    KvBlock,
    Leave,
    Revoke,
    StatusUpdate,
    Welcome,
    WorkerEntry,
    Workers,
    WorkerStatus,
)
from protocol.messages.worker import (
    CacheOff,
    Fault,
    FromWorker,
    Hello,
    Ping,
    Pong,
    Prefill,
    Shutdown,
    Start,
    Stop,
    ToWorker,
)
from protocol.security.addresses import endpoint
from protocol.security.keys import JoinLine, own_keys
from protocol.transport import MAX_WORKER_FRAME, Stamp

_NO_STAMP = Stamp(0, 0)
_LINES = 20
"""In the log, of one machine, in a minute: it can join and leave thousands of times."""
log = logging.getLogger(__name__)

WorkerEvent: TypeAlias = WorkerUp | WorkerDown | Arrived


class RemoteWorkers:
    """Admits machines by their keys, and accepts a worker's message only with the stamp that its machine was given."""

    def __init__(
        self,
        context: zmq.Context[Any],
        setup: OrchestratorSetup,
        epoch: int,
        registry: RemoteRegistry,
        local_entries: Callable[[], list[WorkerEntry]],
    ) -> None:
        """`local_entries` lists the local workers. Raises InputError if it can't listen."""
        assert setup.listening is not None
        folder = Path(setup.listening.folder)
        self._keys = own_keys(folder)
        self._guard = Guard(context, folder)
        self._hub = Hub(
            context, setup.listening.address, FromRemote, guard=self._guard, keys=self._keys, limit=MAX_WORKER_FRAME
        )
        self._owner = Hub(context, Session(Path(setup.session)).owner_address, FromOwner)
        self._epoch = epoch
        self._keeps_kv = setup.options.keeps_kv
        self._registry = registry
        self._local_entries = local_entries
        self.intake = KvIntake(epoch, setup.options.arenas << 20)
        self._features = _FeatureShipping(self._hub, epoch)
        self._target_features: FeatureIntake | None = None
        """Of the target that is up, if it records any."""
        self._refused_prefills: list[Arrived] = []
        """Faults of Prefills that were not sent, which the next `give_up_due` yields."""
        self._lines = defaultdict[str, LineLimit](lambda: LineLimit(_LINES))
        """Of each machine."""
        self.stale = 0
        """Messages of admitted machines with a stamp that is not theirs, or of a kind that they may not send."""

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        return [self._guard.socket, self._hub.socket, self._owner.socket]

    def receive(self) -> Iterator[WorkerEvent]:
        """Answer handshakes; events from messages of workers and of the owner."""
        self._guard.handle(time.monotonic())
        for arrival in self._hub.receive():
            yield from self._on_message(arrival)
        for arrival in self._owner.receive():
            yield from self._on_owner(arrival)

    def send(self, incarnation: int, message: ToWorker) -> None:
        """Send to a worker; the next `give_up_due` gives up one that can't be reached."""
        worker = self._registry.get(incarnation)
        if worker is None or worker.hello is None:
            return
        if isinstance(message, Prefill):
            prefill = self.intake.open(message)
            if isinstance(prefill, Fault):
                self._refused_prefills.append(Arrived(worker.role, incarnation, prefill))
                return
            message = prefill
        elif worker.role == "target" and self._target_features is not None:
            _note_serving(self._target_features, message)
        elif isinstance(message, Stop):
            self._features.forget(worker, message.request)
            if worker.role == "prefill":
                self.intake.discard(message.request)
        elif isinstance(message, Features):
            self._features.announce(worker, message)
            return
        self._send(worker, message)

    def give_up_due(self) -> Iterator[WorkerEvent]:
        """Yield the faults of refused Prefills, and give up workers that are unreachable or silent."""
        refused, self._refused_prefills = self._refused_prefills, []
        yield from refused
        for worker in self._registry.overdue(time.monotonic()):
            yield self._remove(worker, "unreachable" if worker.lost else "silent")

    def ping(self, statuses: Mapping[int, WorkerStatus]) -> None:
        """Every few seconds: send a Ping to each worker, and its status to its machine."""
        for worker in self._registry:
            if worker.hello is not None:
                worker.status = statuses.get(worker.incarnation, worker.status)
                self._send(worker, self._registry.ping(worker, time.perf_counter()))
            sent = self._send_control(worker, StatusUpdate(worker.life, worker.status, worker.round_trip))
            if worker.hello is None and not sent:
                worker.lost = True

    def deadline(self) -> float | None:
        return 0.0 if self._refused_prefills else self._registry.deadline()

    def has(self, incarnation: int) -> bool:
        return self._registry.get(incarnation) is not None

    def dismiss(self, incarnation: int, text: str) -> None:
        """Remove a worker that can't serve this pipeline, and send its machine the reason."""
        worker = self._registry.get(incarnation)
        if worker is not None:
            self._refuse(worker.control, InputError(text))
            self._remove(worker, text)

    def give_up(self, incarnation: int, reason: str) -> Iterator[WorkerEvent]:
        """Remove a worker that does not answer; its machine may attach another."""
        worker = self._registry.get(incarnation)
        if worker is not None:
            yield self._remove(worker, reason)

    def close(self) -> None:
        for worker in self._registry:
            self._remove(worker, "the pipeline ends")
        self._hub.close(linger=200)
        self._owner.close()
        self._guard.close()

    # Other machines ---------------------------------------------------------------------------

    def _on_message(self, arrival: Arrival) -> Iterator[WorkerEvent]:
        now = time.monotonic()
        match arrival.message:
            case Join() as join:
                self._join(arrival, join, now)
            case Attach() as attach:
                self._attach(arrival, attach, now)
            case Leave(life):
                for worker in self._registry.of(arrival.identity):
                    if worker.life == life:
                        yield self._remove(worker, "its machine took it back")
            case message:
                epoch, incarnation = arrival.stamp
                worker = self._registry.find(incarnation, arrival.identity)
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
        log.info("the machine %s joined", name)
        self._hub.send(arrival.peer, Joined(name), _NO_STAMP)

    def _attach(self, arrival: Arrival, attach: Attach, now: float) -> None:
        name = self._guard.pins.name_of(arrival.identity)
        if name is None:
            self._refuse(arrival.peer, InputError("This key is not known here: join first, with a join line."))
            return
        admitted = self._registry.attach(name, arrival.identity, arrival.peer, attach, now)
        if isinstance(admitted, str):
            self._refuse(arrival.peer, PipelineError(admitted))
            return
        self._send_control(admitted, Welcome(attach.life, self._epoch, admitted.incarnation, self._keeps_kv))

    def _on_worker(
        self,
        worker: RemoteWorker,
        peer: bytes,
        message: FromWorker | KvBlock | FeatureBlock,
        payload: bytes,
    ) -> Iterator[WorkerEvent]:
        match message:
            case Hello() as hello:
                introduced = worker.hello is not None
                mismatch = self.intake.mismatch(hello) if hello.role == worker.role == "prefill" else None
                if not self._registry.introduce(worker, peer, hello):
                    self.dismiss(worker.incarnation, f"A {hello.role} worker came as the {worker.role}.")
                elif mismatch is not None:
                    self.dismiss(worker.incarnation, mismatch)
                elif not introduced:
                    self._log(logging.INFO, worker, f"is up: {hello.model} on {hello.device}")
                    if worker.role == "target" and hello.taps is not None:
                        self._target_features = FeatureIntake(hello.taps, self._epoch, hello.model_fingerprint)
                    yield WorkerUp(worker.incarnation, hello, remote=True)
                    self._probe(worker)
            case Fault(kind="fatal", text=text):
                self._refuse(worker.control, PipelineError(text or "The worker ended without a reason."))
                yield self._remove(worker, text)
            case Pong() as pong:
                if self._registry.pong(worker, pong, time.perf_counter()):
                    self._probe(worker)
                self._features.acknowledge(worker, pong)
                yield Arrived(worker.role, worker.incarnation, pong)
            case _ if worker.hello is None or isinstance(message, KvOffer | Features | CacheOff):
                # A message before the Hello is invalid, and so is the name of another machine's shared memory. Nothing
                # is kept on disk of another machine's target.
                self.stale += 1
            case KvBlock() as block if worker.role == "prefill":
                answer = self.intake.add(block, payload)
                if answer is not None:
                    yield Arrived(worker.role, worker.incarnation, answer)
            case FeatureBlock() as block if worker.role == "target" and self._target_features is not None:
                self._send(worker, FeaturesTaken(block.number))
                features = self._target_features.add(block, payload)
                if features is not None:
                    yield Arrived(worker.role, worker.incarnation, features)
            case KvBlock() | FeatureBlock():
                self.stale += 1
            case _:
                worker.peer = peer
                if isinstance(message, Fault) and message.request is not None:
                    # The draft serves it no longer, and no Stop will say so.
                    self._features.forget(worker, message.request)
                yield Arrived(worker.role, worker.incarnation, message)

    def _probe(self, worker: RemoteWorker) -> None:
        self._send(worker, self._registry.ping(worker, time.perf_counter()))

    def _remove(self, worker: RemoteWorker, reason: str) -> WorkerDown:
        """Void a worker's stamp and send it a Shutdown."""
        if worker.hello is not None:
            self._send(worker, Shutdown())
        self._registry.drop(worker)
        self._features.drop(worker)
        if worker.role == "prefill":
            self.intake.clear()
        if worker.role == "target" and self._target_features is not None:
            self._target_features.close()
            self._target_features = None
        self._log(logging.WARNING, worker, f"is gone: {reason}")
        return WorkerDown(worker.role, worker.incarnation)

    def _log(self, level: int, worker: RemoteWorker, text: str) -> None:
        left_out = self._lines[worker.name].take(time.monotonic())
        if left_out is not None:
            before = f" ({left_out} lines before were left out)" if left_out else ""
            log.log(level, "the %s worker of %s %s%s", worker.role, worker.name, text, before)

    def _send(self, worker: RemoteWorker, message: ToWorker) -> None:
        full = self._hub.queue_full
        if not self._hub.send(worker.peer, message, Stamp(self._epoch, worker.incarnation)):
            # A full queue is no loss: it empties, or the worker is given up as silent.
            worker.lost = worker.lost or self._hub.queue_full == full

    def _send_control(self, worker: RemoteWorker, message: Message) -> bool:
        """Send to the command that attached the worker."""
        return self._hub.send(worker.control, message, _NO_STAMP)

    def _refuse(self, peer: bytes, error: PipelineError) -> None:
        self._hub.send(peer, Refused("", str(error)[:4000], blame_of(error)), _NO_STAMP)

    # The owner --------------------------------------------------------------------------------

    def _on_owner(self, arrival: Arrival) -> Iterator[WorkerEvent]:
        try:
            answer: Message = self._workers()
            match arrival.message:
                case Invite():
                    answer = self._invitation()
                case Revoke(name):
                    identity = self._guard.revoke(name)
                    for worker in self._registry.of(identity):
                        text = "The owner of that pipeline has revoked this machine: ask for a new join line."
                        self._refuse(worker.control, InputError(text))
                        yield self._remove(worker, "revoked")
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
        entries = [*self._local_entries(), *(worker.entry() for worker in self._registry)]
        present = {entry.name for entry in entries}
        absent = [
            WorkerEntry(name=name, role=None, status="gone") for name in self._guard.pins.by_name if name not in present
        ]
        return Workers((*entries, *absent))


def _note_serving(features: FeatureIntake, message: ToWorker) -> None:
    """What a target is sent says which features may come."""
    match message:
        case Tap():
            features.tap(message)
        case Start(sequence):
            features.begin(sequence)
        case Stop(sequence):
            features.end(sequence)
        case _:
            pass


class _FeatureShipping:
    """Sends the target's features to drafts on other machines: read from this machine's rings, and sent as blocks. An
    outlet for each draft that reads features, which acknowledges its blocks by the answer to a Ping behind them."""

    def __init__(self, hub: Hub, epoch: int) -> None:
        self._hub = hub
        self._epoch = epoch
        self._outlets: dict[int, FeatureOutlet] = {}
        """By incarnation."""

    def announce(self, worker: RemoteWorker, message: Features) -> None:
        """A ring of this machine holds features of a sequence that the worker serves."""
        if worker.hello is None or worker.hello.features is None:
            return
        outlet = self._outlets.setdefault(worker.incarnation, FeatureOutlet(worker.hello.features))
        outlet.announce(message)
        self._ship(worker, outlet)

    def acknowledge(self, worker: RemoteWorker, pong: Pong) -> None:
        """A worker has handled everything that was sent before this Ping."""
        outlet = self._outlets.get(worker.incarnation)
        if outlet is not None and outlet.acknowledge(pong.sent):
            self._ship(worker, outlet)

    def forget(self, worker: RemoteWorker, sequence: RequestId) -> None:
        """The worker serves this sequence no longer."""
        outlet = self._outlets.get(worker.incarnation)
        if outlet is not None:
            outlet.forget(sequence)

    def drop(self, worker: RemoteWorker) -> None:
        """The worker is gone."""
        outlet = self._outlets.pop(worker.incarnation, None)
        if outlet is not None:
            outlet.close()

    def _ship(self, worker: RemoteWorker, outlet: FeatureOutlet) -> None:
        """Send the blocks that are due. Those for which the queue has no room are lost."""
        stamp = Stamp(self._epoch, worker.incarnation)
        due = outlet.due()
        queued = sum(self._hub.send(worker.peer, block, stamp, payload) for block, payload in due.blocks)
        ping = Ping(time.perf_counter())
        if queued and self._hub.send(worker.peer, ping, stamp):
            due.sent(queued, ping.sent)
