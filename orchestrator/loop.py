"""The orchestrator's shell: sockets, processes and the clock around the pure state machine."""

import gc
import itertools
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import structlog
import zmq

from orchestrator.core.commands import Command, Dismiss, Emit, Finish, Reject, Release, Replace, Tell
from orchestrator.core.events import Arrived, Ended, Event, Submitted, Tick, WorkerDown, WorkerUp
from orchestrator.core.machine import Machine
from orchestrator.journal import Journal
from orchestrator.requests import Conversation, to_request
from orchestrator.session import Session
from orchestrator.setup import OrchestratorSetup
from orchestrator.supervisor import Child, Death, Supervisor
from orchestrator.tokenizer import TextCodec
from orchestrator.tracing import Recording, Trace
from protocol.codec import Stamp
from protocol.errors import InputError, PipelineError, blame_of
from protocol.link import Arrival, Hub
from protocol.messages import (
    Cancel,
    Fault,
    FromClient,
    FromWorker,
    Hello,
    Inquire,
    Message,
    Ping,
    Pong,
    Prefilled,
    Refused,
    Role,
    SequenceId,
    Shutdown,
    State,
    Submit,
)
from protocol.segment_registry import unlink_owned, unlink_segment

_PING_SECONDS = 2.0
_MOST_REQUESTS = 256
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
        self._clients = Hub(context, setup.address, FromClient, on_reject=self._reject_frame)
        self._workers = Hub(context, self._session.worker_address, FromWorker)
        self._poller = zmq.Poller()
        self._conversations: dict[SequenceId, Conversation] = {}
        self._sequences = itertools.count(1)
        self._hellos: dict[Role, Hello] = {}
        self._peers: dict[int, bytes] = {}
        """Routing ids of workers by incarnation."""
        self._inquirers: dict[bytes, Stamp] = {}
        self._failure: PipelineError | None = None
        self._was_ready = False
        self._faults: dict[int, str] = {}
        """What a worker said before it ended, by incarnation."""
        self._next_ping = 0.0
        self._stopping = False

    def run(self) -> None:
        """Serve until the parent is gone or SIGTERM comes; then end every worker."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_stopping", True))
        for hub in (self._clients, self._workers):
            self._poller.register(hub.socket, zmq.POLLIN)
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
        for arrival in self._clients.receive():
            self._on_client(arrival)
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
            if not self._conversations:
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
                self._emit(self._conversations[sequence], tokens)
            case Finish():
                self._finish(command)
            case Reject(sequence, text):
                self._answer(self._conversations.pop(sequence), InputError(text))
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

    # Clients ----------------------------------------------------------------------------------

    def _on_client(self, arrival: Arrival) -> None:
        match arrival.message:
            case Inquire():
                self._inquirers[arrival.peer] = arrival.stamp
                self._clients.send(arrival.peer, self._state(), arrival.stamp)
            case Submit() as submit:
                self._submit(arrival.peer, arrival.stamp, submit)
            case Cancel(request):
                for conversation in list(self._conversations.values()):
                    if (conversation.peer, conversation.request) == (arrival.peer, request):
                        self._step(Ended(conversation.sequence, "cancelled"))
            case _:
                pass

    def _submit(self, peer: bytes, stamp: Stamp, submit: Submit) -> None:
        sequence = SequenceId(next(self._sequences))
        conversation = Conversation.open(sequence, peer, stamp, submit, self._codec)
        try:
            if self._failure is not None:
                raise self._failure
            if len(self._conversations) >= _MOST_REQUESTS:
                raise PipelineError(f"The pipeline already serves {_MOST_REQUESTS} requests: try again in a moment.")
            request = to_request(submit, self._codec, self._setup.options)
        except PipelineError as error:
            self._answer(conversation, error)
            return
        self._conversations[sequence] = conversation
        self._step(Submitted(sequence, request))

    def _emit(self, conversation: Conversation, tokens: tuple[int, ...]) -> None:
        if conversation.stopped:
            return
        piece = conversation.piece(tokens)
        if not self._clients.send(conversation.peer, piece, conversation.stamp):
            self._step(Ended(conversation.sequence, "cancelled"))
        elif conversation.stopped:
            self._step(Ended(conversation.sequence, "stop", surplus=len(tokens) - len(piece.tokens)))

    def _finish(self, command: Finish) -> None:
        conversation = self._conversations.pop(command.sequence)
        rest = conversation.rest()
        if rest is not None:
            self._clients.send(conversation.peer, rest, conversation.stamp)
        done = conversation.done(command.reason, command.statistics)
        self._clients.send(conversation.peer, done, conversation.stamp)

    def _answer(self, conversation: Conversation, error: PipelineError) -> None:
        refused = Refused(conversation.request, str(error)[:4000], blame_of(error))
        self._clients.send(conversation.peer, refused, conversation.stamp)

    def _reject_frame(self, peer: bytes, text: str) -> None:
        self._clients.send(peer, Refused("", text[:4000], "pipeline"), Stamp(0, 0))

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
        state = self._state()
        if state.ready and not self._was_ready:
            self._was_ready = True
            self._tell_inquirers(state)

    def _fail(self, error: PipelineError) -> None:
        """The pipeline can't go on; whoever waits is told why."""
        log.error("pipeline failed", reason=str(error))
        self._failure = error
        self._session.record_failure(error)
        for conversation in self._conversations.values():
            self._answer(conversation, error)
        self._conversations.clear()
        self._tell_inquirers(self._state())

    def _tell_inquirers(self, state: State) -> None:
        for peer, stamp in self._inquirers.items():
            self._clients.send(peer, state, stamp)

    def _close(self) -> None:
        stopped = PipelineError("The pipeline was stopped while it served this request: start it and ask again.")
        for conversation in self._conversations.values():
            self._answer(conversation, stopped)
        for role in self._supervisor.children:
            self._tell(role, Shutdown())
        self._supervisor.stop(told=self._peers)
        self._workers.close()
        unlink_owned()
        # Give ZeroMQ's thread the moment it needs to hand over the last frames.
        self._clients.close(linger=200)
        self._journal.close()
        self._trace.save()
        with suppress(OSError):
            self._session.remove()
