"""All workers of a pipeline: its own and remote ones. Yields events of the state machine."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import zmq

from orchestrator.core.events import Arrived, WorkerDown, WorkerUp
from orchestrator.runtime.hub import Arrival, Hub
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.runtime.workers.remote_registry import RemoteRegistry
from orchestrator.runtime.workers.supervisor import Child, Seat, Supervisor
from protocol.contracts.engines import NO_DRAFT
from protocol.errors import InputError, PipelineError
from protocol.messages.base import Message, Role
from protocol.messages.remote import WorkerEntry, WorkerStatus
from protocol.messages.worker import Cores, Fault, FromWorker, Hello, Ping, Prefilled, Shutdown, ToWorker
from protocol.transport import Stamp

if TYPE_CHECKING:
    from orchestrator.runtime.recording import Recording
    from orchestrator.runtime.workers.remote import RemoteWorkers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerRetired:
    """A local worker that was no longer needed has ended."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class DraftLost:
    """A local draft has ended and is not started again; the engine of the draft is chosen while the pipeline runs."""

    seat: Seat
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerNews:
    """A local worker died at work, or runs again, as a sentence for the user."""

    text: str


WorkerEvent: TypeAlias = WorkerUp | WorkerDown | Arrived
WorkerEventOrError: TypeAlias = WorkerEvent | WorkerNews | WorkerRetired | DraftLost | PipelineError
"""An event, or the reason why the pipeline has failed."""


class Trace:
    """What a profile hears of the loop and of the workers' messages. This one records nothing; `Recording` does."""

    def now(self) -> int:
        return 0

    def woke(self) -> None:
        """The poll has returned."""

    def arrived(self, role: Role, incarnation: int, message: Message) -> None:
        """A worker's message was read."""

    def stepped(self, began: int) -> None:
        """An event and its commands are handled; that began at `began`."""

    def sent(self, role: Role, incarnation: int, message: Message, began: int) -> None:
        """A message was sent to a worker."""

    def save(self) -> None:
        """Write everything."""


class WorkerPool:
    """Local and remote workers behind one interface; each worker is identified by its incarnation."""

    def __init__(
        self, context: zmq.Context[Any], setup: OrchestratorSetup, epoch: int, drafts: bool, trace: "Trace | Recording"
    ) -> None:
        """`drafts`: whether the strategy uses a draft."""
        self._setup = setup
        self._drafts = drafts
        self.local = LocalWorkers(context, setup, epoch, trace)
        self._remote: RemoteWorkers | None = None
        if setup.listening is not None:
            # With numpy, a quarter of an orchestrator's imports, which a pipeline without other machines does without.
            from orchestrator.runtime.workers import remote

            self._refusals = self._initial_refusals()
            registry = RemoteRegistry(self.local.supervisor.next_incarnation, self._refusals)
            self._remote = remote.RemoteWorkers(context, setup, epoch, registry, self.local.entries)

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of the local workers."""
        wanted: dict[Role, bool] = {
            "target": self._setup.target_engine != "none",
            "draft": self._setup.draft_engine != NO_DRAFT and self._drafts,
            "prefill": self._setup.prefill_engine not in ("none", "guest"),
        }
        return tuple(role for role in wanted if wanted[role])

    def start(self, poller: zmq.Poller) -> None:
        """Start the local workers, and register all sockets in `poller`."""
        self.local.start(self.roles, poller)
        for socket in [] if self._remote is None else self._remote.sockets:
            poller.register(socket, zmq.POLLIN)

    def receive(self, ready: Iterable[Any]) -> Iterator[WorkerEventOrError]:
        """Events from messages and from the ends of workers; `ready` are the sockets that the poller reports."""
        if self._remote is None:
            return self.local.receive(ready)
        return chain(self._admitting_prefill(self._remote, self.local.receive(ready)), self._remote.receive())

    def send(self, incarnation: int, message: ToWorker) -> None:
        """Send to a worker, if it is up."""
        self._home(incarnation).send(incarnation, message)

    def _home(self, incarnation: int) -> "LocalWorkers | RemoteWorkers":
        remote = self._remote
        return remote if remote is not None and remote.has(incarnation) else self.local

    def ping(self, statuses: Mapping[int, WorkerStatus]) -> None:
        """Send a Ping to all workers; `statuses` are those of the drafts."""
        self.local.ping()
        if self._remote is not None:
            self._remote.ping(statuses)

    def handle_due(self, now: float) -> Iterator[WorkerEventOrError]:
        """Restart local workers and give up remote ones, where that is due."""
        self.local.restart_due(now)
        if self._remote is not None:
            yield from self._remote.give_up_due()

    def deadline(self) -> float | None:
        due = [self.local.supervisor.deadline(), None if self._remote is None else self._remote.deadline()]
        return min((at for at in due if at is not None), default=None)

    def replace(self, role: Role, incarnation: int, reason: str) -> Iterator[WorkerEventOrError]:
        """End a worker that does not answer."""
        if self._remote is not None and self._remote.has(incarnation):
            yield from self._remote.give_up(incarnation, reason)
        else:
            self.local.supervisor.kill(role)

    def dismiss(self, role: Role, incarnation: int, text: str) -> Iterator[WorkerEventOrError]:
        """End a worker that can't serve this pipeline: a remote one is sent the reason, a local one is an error."""
        if self._remote is not None and self._remote.has(incarnation):
            self._remote.dismiss(incarnation, text)
        else:
            yield from self.local.dismiss(incarnation, text)

    def stop(self) -> None:
        if self._remote is not None:
            self._remote.close()
        self.local.stop()

    def _admitting_prefill(
        self, remote: "RemoteWorkers", local: "Iterable[WorkerEventOrError]"
    ) -> "Iterator[WorkerEventOrError]":
        """The local events. Remote prefill workers are admitted once the target has announced its KV format."""
        for event in local:
            if isinstance(event, WorkerUp) and event.hello.role == "target":
                remote.intake.target = event.hello
                if self._setup.prefill_engine == "guest":
                    self._refusals.pop("prefill", None)
            yield event

    def _initial_refusals(self) -> dict[Role, str]:
        """Roles that remote workers may not have, with the reasons."""
        refusals: dict[Role, str] = {
            "prefill": "The target of this pipeline is still being loaded."
            if self._setup.prefill_engine == "guest"
            else "This pipeline takes no prefill worker, which could change its text: "
            "its owner has to start it with prefill engine guest.",
        }
        if self._setup.target_engine != "none":
            refusals["target"] = "This pipeline has its own target: its owner has to start it with target engine none."
        if not self._drafts:
            refusals["draft"] = f"This pipeline runs the strategy {self._setup.options.strategy}, which uses no draft."
        return refusals


class LocalWorkers:
    """Starts one worker for each role, exchanges messages with it, and restarts it when it dies."""

    def __init__(
        self, context: zmq.Context[Any], setup: OrchestratorSetup, epoch: int, trace: "Trace | Recording"
    ) -> None:
        session = Session(Path(setup.session))
        self._setup = setup
        self.supervisor = Supervisor(setup, session, epoch)
        self._trace = trace
        self.settled = False
        """The pipeline has been ready once: from now on a failing worker is not the user's mistake."""
        self._epoch = epoch
        self._hub = Hub(context, session.worker_address, FromWorker)
        self._poller: zmq.Poller | None = None
        self._peers: dict[int, bytes] = {}
        """Routing ids of workers by incarnation."""
        self._hellos: dict[int, Hello] = {}
        self._faults: dict[int, str] = {}
        """The fatal fault that a worker reported before it ended, by incarnation."""
        self._died: set[Seat] = set()
        """Seats whose worker died at work and is started again."""

    def start(self, roles: Iterable[Role], poller: zmq.Poller) -> None:
        """Start a worker for each role, and register all sockets in `poller`."""
        self._poller = poller
        poller.register(self._hub.socket, zmq.POLLIN)
        for role in roles:
            self.start_worker(role)

    def start_worker(self, seat: Seat) -> None:
        """Start the worker of a seat; if a retired one still ends there, after that one. No other one may be there."""
        child = self.supervisor.children.get(seat)
        if child is not None:
            assert child.retired, f"the {seat} runs already"
            child.succeeded = True
        else:
            self._watch(self.supervisor.start(seat))

    def seat_of(self, incarnation: int) -> Seat | None:
        """The seat of a worker that runs and was not told to end."""
        children = [child for child in self.supervisor.children.values() if not child.retired]
        return next((child.seat for child in children if child.incarnation == incarnation), None)

    def receive(self, ready: Iterable[Any]) -> Iterator[WorkerEventOrError]:
        """Events from messages and from the ends of workers; `ready` are the sockets that the poller reports."""
        for arrival in self._hub.receive():
            yield from self._on_message(arrival)
        for child in list(self.supervisor.children.values()):
            if child.life.fileno() in ready:
                yield from self._on_death(child)

    def send(self, incarnation: int, message: ToWorker) -> None:
        """Send to a worker, if it is up."""
        if incarnation not in self._peers:
            return
        began = self._trace.now()
        self._send(incarnation, message)
        self._trace.sent(self._hellos[incarnation].role, incarnation, message, began)

    def dismiss(self, incarnation: int, text: str) -> Iterator[WorkerEventOrError]:
        """End a worker that can't serve this pipeline. The pipeline fails without it, unless MLX can draft instead."""
        seat = self.seat_of(incarnation)
        if seat is not None and self._replaceable(seat):
            self.supervisor.retire(seat)
            yield DraftLost(seat, f"was dismissed: {text}")
        else:
            if seat is not None:
                self.supervisor.forget(seat)
            yield InputError(text)

    def place(self, shared_device: bool) -> None:
        """Draft and target compute on one device or apart from now on."""
        for incarnation, cores in self.supervisor.place(shared_device).items():
            self._send(incarnation, Cores(cores))

    def ping(self) -> None:
        """Send a Ping to all workers."""
        for incarnation in self._peers:
            self._send(incarnation, Ping(time.perf_counter()))

    def restart_due(self, now: float) -> None:
        """Restart the workers whose restart is due."""
        for child in self.supervisor.restart_due(now):
            self._watch(child)

    def entries(self) -> list[WorkerEntry]:
        """The workers that are up, without round trips."""
        return [
            WorkerEntry(
                name="local",
                role=hello.role,
                engine=hello.engine,
                model=hello.model,
                device=hello.device,
                status="ready",
            )
            for hello in (self._hellos[incarnation] for incarnation in self._peers)
        ]

    def stop(self) -> None:
        """End all workers, with a Shutdown to those that are up."""
        for incarnation in list(self._peers):
            self.send(incarnation, Shutdown())
        self.supervisor.stop(self._peers)
        self._hub.close()

    def _replaceable(self, seat: Seat) -> bool:
        """The worker is a Core ML draft that nobody asked for: MLX can draft in its place."""
        first = seat == "draft" and self._setup.draft_engine == "coreml"
        return self._setup.auto is not None and (first or seat == "second draft")

    def _watch(self, child: Child) -> None:
        assert self._poller is not None
        self._poller.register(child.life.fileno(), zmq.POLLIN)

    def _send(self, incarnation: int, message: Message) -> None:
        if incarnation in self._peers:
            self._hub.send(self._peers[incarnation], message, Stamp(self._epoch, incarnation))

    def _on_message(self, arrival: Arrival) -> Iterator[WorkerEventOrError]:
        epoch, incarnation = arrival.stamp
        child = next((c for c in self.supervisor.children.values() if c.incarnation == incarnation), None)
        if epoch != self._epoch or child is None:
            # It is of an ended life.
            return
        self._trace.arrived(child.role, incarnation, arrival.message)
        match arrival.message:
            case Hello(role=role) if role != child.role:
                yield InputError(f"A {role} worker was started as the {child.role}: check the command that starts it.")
            case Hello() as hello:
                self._peers[incarnation] = arrival.peer
                self._hellos[incarnation] = hello
                log.info("the %s worker is up: %s on %s", hello.role, hello.model, hello.device)
                if child.seat in self._died:
                    self._died.discard(child.seat)
                    yield WorkerNews(f"The {child.role} worker runs again.")
                yield WorkerUp(incarnation, hello, shared_device=self.supervisor.shared_device(child.seat))
            case Fault(kind="fatal", text=text):
                self._faults[incarnation] = text
            case message:
                if isinstance(message, Fault) and child.role == "prefill":
                    log.warning("the target prefills a prompt itself: %s", message.text)
                if isinstance(message, Prefilled) and message.warning:
                    log.warning("KV was not adopted: %s", message.warning)
                yield Arrived(child.role, incarnation, message)

    def _on_death(self, child: Child) -> Iterator[WorkerEventOrError]:
        assert self._poller is not None
        self._poller.unregister(child.life.fileno())
        # Its last messages may still be in the queue.
        for arrival in self._hub.receive():
            yield from self._on_message(arrival)
        cause = self.supervisor.reap(child.seat, time.monotonic())
        self._peers.pop(child.incarnation, None)
        was_up = self._hellos.pop(child.incarnation, None) is not None
        if child.retired:
            yield WorkerRetired(child.incarnation)
        else:
            log.warning("the %s worker died: %s", child.role, cause)
        yield WorkerDown(child.role, child.incarnation)
        yield from () if child.retired else self._after_death(child, cause, was_up)

    def _after_death(self, child: Child, cause: str, was_up: bool) -> Iterator[WorkerEventOrError]:
        """A fault at the start ends the pipeline; a worker that died at work is restarted, unless it died too often."""
        reason = self._faults.pop(child.incarnation, None)
        if self._replaceable(child.seat):
            if not was_up or not self.supervisor.restarting(child.seat):
                # Its model can't be loaded, or it died too often: the other engine drafts.
                self.supervisor.forget(child.seat)
                yield DraftLost(child.seat, f"ended ({reason})" if reason else cause)
        elif reason is not None and not self.settled:
            self.supervisor.forget(child.seat)
            yield InputError(reason)
        elif not self.supervisor.restarting(child.seat):
            text = f"The {child.seat} worker {cause} It died three times within a minute and is not started again."
            if child.seat == "target" or not self.settled:
                yield PipelineError(f"{text} Run `launch-pipeline doctor`, or choose another model.")
            else:
                log.error("%s", text)
                yield WorkerNews(f"{text} Requests go on without it.")
                if child.seat == "draft":
                    yield DraftLost(child.seat, cause)
        if self.supervisor.restarting(child.seat):
            self._died.add(child.seat)
            told = f"failed ({reason.rstrip('.')})." if reason else f"{cause.rstrip('.')}."
            yield WorkerNews(f"The {child.seat} worker {told} Starting it again.")
