"""The orchestrator's shell: sockets, processes and the clock around the pure state machine."""

import gc
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import structlog
import zmq

from orchestrator.core.commands import Command, Dismiss, Emit, Finish, Reject, Release, Replace, Tell
from orchestrator.core.events import Arrived, Event, Tick, WorkerDown, WorkerUp
from orchestrator.core.machine import Machine
from orchestrator.desk import Desk
from orchestrator.far_hub import FarHub
from orchestrator.journal import Journal
from orchestrator.session import Session
from orchestrator.setup import OrchestratorSetup
from orchestrator.supervisor import Child, Death, Supervisor
from orchestrator.tokenizer import TextCodec
from orchestrator.tracing import Recording, Trace
from protocol.codec import Stamp
from protocol.errors import InputError, PipelineError, blame_of
from protocol.link import Arrival, Hub
from protocol.messages import (
    Fault,
    FromWorker,
    Hello,
    Message,
    Ping,
    Pong,
    Prefilled,
    Role,
    Shutdown,
    State,
)
from protocol.segment_registry import unlink_owned, unlink_segment

_PING_SECONDS = 2.0
log = structlog.get_logger()


class Orchestrator:
    """One pipeline: its machine, its workers, its clients."""

    def __init__(self, setup: OrchestratorSetup, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._setup = setup
        self._session = Session(Path(setup.session))
        self._epoch = int.from_bytes(os.urandom(4)) + 1
        self._codec = TextCodec(Path(setup.target))
        self._machine = Machine(setup.options, setup.pace.name if setup.pace else "")
        self._journal = Journal.to(setup.record)
        self._trace = Recording(Path(setup.trace)) if setup.trace else Trace()
        self._supervisor = Supervisor(setup, self._session, self._epoch)
        self._desk = Desk(context, setup, self._codec, self._state)
        self._workers = self._hub(context)
        self._poller = zmq.Poller()
        self._hellos: dict[Role, Hello] = {}
        self._peers: dict[int, bytes] = {}
        """Routing ids of workers by incarnation."""
        self._failure: PipelineError | None = None
        self._was_ready = False
        self._faults: dict[int, str] = {}
        """What a worker said before it ended, by incarnation."""
        self._next_ping = 0.0
        self._stopping = False

    def run(self) -> None:
        """Serve until the parent is gone or SIGTERM comes; then end every worker."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_stopping", True))
        for socket in (self._desk.socket, self._workers.socket):
            self._poller.register(socket, zmq.POLLIN)
        if self._setup.life is not None:
            self._poller.register(self._setup.life, zmq.POLLIN)
        for role in self._roles():
            self._watch(self._supervisor.start(role))
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._close()

    def _turn(self) -> None:
        """Wait for something to happen, and let it."""
        ready = {source for source, _ in self._poller.poll(self._patience())}
        self._trace.woke()
        for arrival in self._workers.receive():
            self._on_worker(arrival)
        for event in self._desk.receive():
            self._step(event)
        if self._setup.life in ready:
            self._stopping = True
        for child in list(self._supervisor.children.values()):
            if child.life.fileno() in ready:
                self._on_death(child)
        self._on_time()

    def _patience(self) -> int:
        """Milliseconds until something is due."""
        due = [self._machine.deadline(), self._supervisor.deadline(), self._next_ping]
        wait = min(at for at in due if at is not None) - time.monotonic()
        if isinstance(self._workers, FarHub):
            wait = self._workers.patience(wait)
        # Rounded up, so that a turn never comes just before what it is for.
        return max(0, int(wait * 1000) + 1)

    def _on_time(self) -> None:
        now = time.monotonic()
        deadline = self._machine.deadline()
        if deadline is not None and now >= deadline:
            self._step(Tick())
        for child in self._supervisor.restart_due(now):
            self._watch(child)
        if now >= self._next_ping:
            self._next_ping = now + _PING_SECONDS
            for incarnation, peer in self._peers.items():
                self._workers.send(peer, Ping(time.perf_counter()), Stamp(self._epoch, incarnation))
            if self._desk.idle:
                gc.collect()

    def _step(self, event: Event) -> None:
        began, now = self._trace.now(), time.monotonic()
        self._journal.write(event, now)
        for command in self._machine.step(event, now):
            self._perform(command)
        self._trace.stepped(began)

    def _perform(self, command: Command) -> None:
        match command:
            case Tell(role, message):
                self._tell(role, message)
            case Emit(sequence, tokens):
                ended = self._desk.emit(sequence, tokens)
                if ended is not None:
                    self._step(ended)
            case Finish():
                self._desk.finish(command)
            case Reject(sequence, text):
                self._desk.refuse(sequence, InputError(text))
            case Replace(role, _, reason):
                log.warning("worker replaced", role=role, reason=reason)
                self._supervisor.kill(role)
            case Dismiss(role, _, text):
                self._supervisor.forget(role)
                self._fail(InputError(text))
            case Release(name):
                unlink_segment(name)

    # Workers ----------------------------------------------------------------------------------

    def _roles(self) -> tuple[Role, ...]:
        roles: list[Role] = ["target"]
        if self._setup.draft_engine != "none" and self._machine.strategy.drafts:
            roles.append("draft")
        if self._setup.prefill_engine != "none":
            roles.append("prefill")
        return tuple(roles)

    def _hub(self, context: zmq.Context[zmq.Socket[bytes]]) -> Hub:
        """Where workers connect; drafts perhaps by a link that makes them seem far away."""
        address, link = self._session.worker_address, self._setup.draft_link
        if link is None:
            return Hub(context, address, FromWorker)
        children = self._supervisor.children
        return FarHub(context, address, FromWorker, link, lambda stamp: _is_draft(children.values(), stamp))

    def _watch(self, child: Child) -> None:
        self._poller.register(child.life.fileno(), zmq.POLLIN)

    def _tell(self, role: Role, message: Message) -> None:
        child = self._supervisor.children.get(role)
        peer = None if child is None else self._peers.get(child.incarnation)
        if child is not None and peer is not None:
            began = self._trace.now()
            self._workers.send(peer, message, Stamp(self._epoch, child.incarnation))
            self._trace.told(role, child.incarnation, message, began)

    def _probe(self, incarnation: int) -> None:
        """Learn what a profile needs to know of a worker's clock."""
        ping = self._trace.probe(incarnation)
        if ping is not None:
            self._workers.send(self._peers[incarnation], ping, Stamp(self._epoch, incarnation))

    def _on_worker(self, arrival: Arrival) -> None:
        epoch, incarnation = arrival.stamp
        child = next((c for c in self._supervisor.children.values() if c.incarnation == incarnation), None)
        if epoch != self._epoch or child is None:
            self._machine.stale += 1
            return
        self._trace.arrived(child.role, incarnation, arrival.message)
        match arrival.message:
            case Hello(role=role) if role != child.role:
                text = f"A {role} worker was started as the {child.role}: check the command that starts it."
                self._fail(InputError(text))
            case Hello() as hello:
                self._peers[incarnation] = arrival.peer
                self._hellos[hello.role] = hello
                log.info("worker up", role=hello.role, model=hello.model, device=hello.device)
                self._step(WorkerUp(incarnation, hello))
                self._became_ready()
                self._probe(incarnation)
            case Pong() as pong:
                self._step(Arrived(child.role, incarnation, pong))
                self._probe(incarnation)
            case Fault(kind="fatal", text=text):
                self._faults[incarnation] = text
            case message:
                if isinstance(message, Prefilled) and message.warning:
                    log.warning("KV was not adopted", reason=message.warning)
                self._step(Arrived(child.role, incarnation, message))

    def _on_death(self, child: Child) -> None:
        self._poller.unregister(child.life.fileno())
        # What it said before it died may still be in the queue.
        for arrival in self._workers.receive():
            self._on_worker(arrival)
        death = self._supervisor.bury(child.role, time.monotonic())
        self._peers.pop(child.incarnation, None)
        if isinstance(self._workers, FarHub):
            self._workers.cut(child.incarnation)
        log.warning("worker died", role=death.role, cause=death.text)
        self._step(WorkerDown(child.role, child.incarnation))
        self._after_death(death)

    def _after_death(self, death: Death) -> None:
        """A worker that could not even begin is the user's to mend; one that died at work is started again."""
        reason = self._faults.pop(death.incarnation, None)
        if reason is not None and not self._was_ready:
            self._supervisor.forget(death.role)
            self._fail(InputError(reason))
        elif not self._supervisor.restarting(death.role):
            text = f"The {death.role} worker {death.text} It died three times within a minute and is not started again."
            if death.role == "target" or not self._was_ready:
                self._fail(PipelineError(f"{text} Run `launch-pipeline doctor`, or choose another model."))
            else:
                log.error("going on without it", reason=text)

    # State ------------------------------------------------------------------------------------

    def _state(self) -> State:
        target, draft = self._hellos.get("target"), self._hellos.get("draft")
        return State(
            session=self._setup.session,
            ready=self._failure is None and all(role in self._hellos for role in self._roles()),
            failure=None if self._failure is None else str(self._failure)[:4000],
            blame="pipeline" if self._failure is None else blame_of(self._failure),
            target=target.model if target else self._setup.target,
            draft=draft.model if draft else "",
            strategy=self._setup.options.strategy,
            context=target.context if target else 0,
            vocabulary=target.vocabulary if target else 0,
        )

    def _became_ready(self) -> None:
        if self._state().ready and not self._was_ready:
            self._was_ready = True
            self._desk.tell_inquirers()

    def _fail(self, error: PipelineError) -> None:
        """The pipeline can't go on; whoever waits is told why."""
        log.error("pipeline failed", reason=str(error))
        self._failure = error
        self._session.record_failure(error)
        self._desk.refuse_all(error)
        self._desk.tell_inquirers()

    def _close(self) -> None:
        stopped = PipelineError("The pipeline was stopped while it served this request: start it and ask again.")
        self._desk.refuse_all(stopped)
        for role in self._supervisor.children:
            self._tell(role, Shutdown())
        self._supervisor.stop(told=self._peers)
        self._workers.close()
        unlink_owned()
        self._desk.close()
        self._journal.close()
        self._trace.save()
        with suppress(OSError):
            self._session.remove()


def _is_draft(children: Iterable[Child], stamp: Stamp) -> bool:
    return any(child.role == "draft" and child.incarnation == stamp.incarnation for child in children)
