"""The orchestrator's main loop: sockets, processes and the clock around the pure state machine."""

import gc
import logging
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import zmq
from msgspec.structs import replace

from orchestrator.core.commands import (
    Command,
    Dismiss,
    Emit,
    Finish,
    Pardon,
    Place,
    Reject,
    Release,
    Replace,
    SendMessage,
    TellReading,
    TrialDecided,
)
from orchestrator.core.events import Arrived, Event, Submitted, Tick, WorkerDown, WorkerUp
from orchestrator.core.machine import Machine
from orchestrator.core.workers import lowers
from orchestrator.runtime.client_frontend import ClientAddress, ClientFrontend
from orchestrator.runtime.draft_engine import ChosenDraftEngine, DraftEngine
from orchestrator.runtime.notices import Notice, NoticeSender, time_to_stay
from orchestrator.runtime.recording import Journal, Recording
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.runtime.telemetry import Subscribers, TelemetryRecorder
from orchestrator.runtime.workers.pool import (
    DraftLost,
    Trace,
    WorkerEventOrError,
    WorkerNews,
    WorkerPool,
    WorkerRetired,
)
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import InputError, PipelineError, blame_of
from protocol.kv.segments import unlink_owned, unlink_segment
from protocol.messages.base import MAX_STARTED, Role
from protocol.messages.client import PipelineState
from protocol.messages.worker import CacheOff, Hello, KvCut, Lowered, Stop, ToWorker, Unfit
from protocol.speculation.successors import stored_successors

_PING_SECONDS = 2.0
_COLLECTION_SECONDS = 10.0
"""Interval of garbage collection in a pipeline that is never idle: trees are reference cycles. It takes about 1 ms."""
_OFFER_SECONDS = 0.25
"""How often a pipeline that outlived its parent sees whether it may stay."""
_CACHED_TEXTS = 1 << 14
"""Texts of single tokens, for telemetry."""
log = logging.getLogger(__name__)


class Orchestrator:
    """One pipeline: its state machine, its workers, its clients."""

    def __init__(self, setup: OrchestratorSetup, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._setup = setup
        self._session = Session(Path(setup.session))
        self._epoch = int.from_bytes(os.urandom(4)) + 1
        began = time.monotonic()
        self._codec = TextCodec(Path(setup.target))
        self._tokenizer_seconds = time.monotonic() - began
        self._machine = Machine(
            setup.options, setup.pace.name if setup.pace else "", stored_successors(setup.successors)
        )
        self._journal = Journal(setup.record) if setup.record else None
        self._trace = Recording(Path(setup.trace)) if setup.trace else Trace()
        self._subscribers = Subscribers[ClientAddress](
            TelemetryRecorder(self._machine, lru_cache(_CACHED_TEXTS)(self._codec.shown))
        )
        self._clients = ClientFrontend(context, setup, self._codec, self._state, self._subscribers)
        self._workers = WorkerPool(context, setup, self._epoch, self._machine.strategy.drafts, self._trace)
        self._poller = zmq.Poller()
        drafting = setup.auto is not None and "draft" in self._workers.roles
        self._draft_engine = (
            ChosenDraftEngine(setup, self._session, self._workers.local, self._poller, time.monotonic())
            if drafting
            else DraftEngine()
        )
        self._notices = NoticeSender(setup.life)
        self._cache_warnings = 0
        """How often the target turned its disk cache off, and a worker did not keep all KV of an ended request."""
        self._warned: set[str] = set()
        """What the user was told of and is not told of again."""
        self._hellos: dict[Role, Hello] = {}
        self._serving: dict[Role, int] = {}
        """The incarnation that a message to a role goes to."""
        self._up: dict[int, Role] = {}
        """Roles of all workers that are up, by incarnation."""
        self._lost = 0
        self._failure: PipelineError | None = None
        self._was_ready = False
        self._next_ping = self._next_collection = 0.0
        self._stopping = False
        self._offered: str | None = None
        """The address that other commands of this user are given."""
        self._kept: float | None = None
        """Seconds without a message of a client after which it ends, once it has outlived its parent."""

    def run(self) -> None:
        """Serve until the parent ends without asking it to stay, or SIGTERM arrives; then end all workers."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_stopping", True))
        self._poller.register(self._clients.socket, zmq.POLLIN)
        if self._setup.life is not None:
            self._poller.register(self._setup.life, zmq.POLLIN)
        self._workers.start(self._poller)
        self._became_ready()
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            while not self._stopping:
                self._run_once()
        finally:
            self._close()

    def _run_once(self) -> None:
        """Poll once, then handle all that has arrived and all that is due."""
        ready = {source for source, _ in self._poller.poll(self._timeout())}
        self._trace.woke()
        self._handle_all(self._workers.receive(ready))
        self._draft_engine.receive(ready)
        for event in self._clients.receive():
            if isinstance(event, Submitted):
                self._draft_engine.submitted(len(event.task.tokens))
            self._step(event)
        if self._setup.life is not None and self._setup.life in ready:
            self._parent_left(self._setup.life)
        self._handle_due()

    def _parent_left(self, life: int) -> None:
        """The pipeline ends, unless its parent asked it to stay until nobody has asked it anything for so long."""
        self._kept = time_to_stay(life)
        self._stopping = self._stopping or self._kept is None
        self._poller.unregister(life)
        self._clients.heard = time.monotonic()

    def _timeout(self) -> int:
        """Milliseconds until something is due."""
        due = [self._machine.deadline(), self._workers.deadline(), self._subscribers.deadline(), self._next_ping]
        due.append(self._draft_engine.deadline())
        due.append(None if self._kept is None else time.monotonic() + _OFFER_SECONDS)
        wait = min(at for at in due if at is not None) - time.monotonic()
        # Rounded up, so that a poll never ends just before the deadline.
        return max(0, int(wait * 1000) + 1)

    def _handle_due(self) -> None:
        now = time.monotonic()
        deadline = self._machine.deadline()
        if deadline is not None and now >= deadline:
            self._step(Tick())
        self._handle_all(self._workers.handle_due(now))
        self._draft_engine.handle_due(now)
        if self._subscribers.active:
            self._clients.send_telemetry(now)
        if self._kept is not None and self._clients.idle:
            unused = now - self._clients.heard >= self._kept
            self._stopping = self._stopping or unused or self._session.offered == ""
        if now >= self._next_ping:
            self._next_ping = now + _PING_SECONDS
            self._workers.ping(self._machine.drafts.statuses())
            self._restore_folder()
            if self._clients.idle or now >= self._next_collection:
                gc.collect()
                self._next_collection = now + _COLLECTION_SECONDS

    def _restore_folder(self) -> None:
        """Other commands find the pipeline by its folder, and a worker that is started again by the socket there."""
        try:
            if self._kept is None:
                self._offered = self._session.restore(self._offered)
            else:
                self._session.restore(self._setup.address, heir=os.getpid())
        except InputError as error:
            self._warn(f"The pipeline's folder was removed, so it ends. {error}")
            raise

    def _step(self, event: Event) -> None:
        began, now = self._trace.now(), time.monotonic()
        if self._journal is not None:
            self._journal.write(event, now)
        ready = self._machine.step(event, now)
        for command in ready.first:
            self._perform(command)
        rest = ready.then()
        for command in rest:
            self._perform(command)
        if self._subscribers.active:
            # After the commands, which a round waits for.
            self._subscribers.record(event, [*ready.first, *rest], now)
        self._trace.stepped(began)

    def _perform(self, command: Command) -> None:
        match command:
            case SendMessage(role, message, incarnation):
                self._send(role, message, incarnation)
            case Emit() as emit:
                ended = self._clients.emit(emit)
                if ended is not None:
                    self._step(ended)
            case TellReading():
                self._clients.tell_reading(command)
            case Finish():
                self._clients.finish(command)
            case Reject(sequence, text):
                self._clients.refuse(sequence, InputError(text))
            case Replace(role, incarnation, reason):
                log.warning("the %s worker is replaced: %s", role, reason)
                self._handle_all(self._workers.replace(role, incarnation, reason))
            case Pardon():
                self._workers.local.supervisor.pardon("target", time.monotonic())
            case Dismiss(role, incarnation, text):
                self._handle_all(self._workers.dismiss(role, incarnation, text))
            case Release(name):
                unlink_segment(name)
            case Place(shared_device):
                self._workers.local.place(shared_device)
            case TrialDecided() as decided:
                self._draft_engine.trial_decided(decided)

    # Workers ----------------------------------------------------------------------------------

    def _handle_all(self, events: Iterable[WorkerEventOrError]) -> None:
        for event in events:
            self._handle(event)

    def _handle(self, event: WorkerEventOrError) -> None:
        match event:
            case PipelineError():
                self._fail(event)
            case WorkerUp(incarnation, hello):
                self._hellos[hello.role] = hello
                self._up[incarnation] = hello.role
                self._serving[hello.role] = incarnation
                self._step(event)
                self._draft_engine.draft_up(incarnation, hello)
                self._became_ready()
            case Arrived(message=CacheOff(reason)):
                self._cache_warnings += 1
                self._warn(
                    f"The disk cache is off until the next start: {reason.rstrip('.')}. Requests go on without it."
                )
            case Arrived(role, message=KvCut() as cut):
                self._cache_warnings += 1
                self._warn(_cut_text(role, cut), once=f"KV of the {role}")
            case Arrived(role="draft", message=Unfit(guesses, right)):
                self._warn(_unfit_text(guesses, right), once="fit")
            case Arrived(role="target", message=Lowered(level, reason)) if lowers(level, self._hellos["target"].level):
                self._hellos["target"] = replace(self._hellos["target"], level=level)
                what = f"A forward of the target failed ({reason.rstrip('.')})"
                self._warn(f"{what}, so it verifies less from now on (level {level}). Requests go on.")
                self._step(event)
            case WorkerNews(text):
                self._notices.send(Notice(text, "warning"))
            case WorkerRetired(incarnation):
                # It was ended on purpose, so it does not count as lost.
                self._up.pop(incarnation, None)
            case DraftLost(seat, reason):
                self._draft_engine.draft_lost(seat, reason)
            case WorkerDown(role, incarnation):
                self._lost += self._up.pop(incarnation, None) is not None
                if self._serving.get(role) == incarnation:
                    del self._serving[role]
                self._step(event)
            case _:
                self._step(event)

    def _warn(self, text: str, once: str = "") -> None:
        """Tell the log and the user. `once`: what it is about, if it is told only once."""
        if once not in self._warned:
            self._warned.update(filter(None, [once]))
            log.warning("%s", text)
            self._notices.send(Notice(text, "warning"))

    def _send(self, role: Role, message: ToWorker, incarnation: int | None) -> None:
        receiver = self._serving.get(role) if incarnation is None else incarnation
        if receiver is not None:
            self._workers.send(receiver, message)

    # State ------------------------------------------------------------------------------------

    def _state(self) -> PipelineState:
        target, draft = self._hellos.get("target"), self._hellos.get("draft")
        return PipelineState(
            session=self._setup.session,
            ready=self._failure is None and all(role in self._hellos for role in self._workers.roles),
            failure=None if self._failure is None else str(self._failure)[:4000],
            blame="pipeline" if self._failure is None else blame_of(self._failure),
            target=target.model if target else self._setup.target,
            draft=draft.model if draft else "",
            strategy=self._setup.options.strategy,
            context=min(target.context, self._setup.options.context_limit or target.context) if target else 0,
            vocabulary=target.vocabulary if target else 0,
            down=tuple(role for role in self._hellos if role not in self._up.values()),
            lost=self._lost,
            level=target.level if target else "tree",
            kv_warnings=self._machine.kv_warnings + self._cache_warnings,
            sampling=self._setup.sampling,
            start=(("tokenizer", self._tokenizer_seconds), *(target.start if target else ()))[:MAX_STARTED],
        )

    def _became_ready(self) -> None:
        state = self._state()
        if not self._was_ready and state.ready:
            self._was_ready = True
            self._workers.local.settled = True
            self._clients.notify_inquirers()
            self._draft_engine.pipeline_ready(state.level)

    def _fail(self, error: PipelineError) -> None:
        """The pipeline has failed: refuse all requests, and report the reason."""
        log.error("the pipeline failed: %s", error)
        self._failure = error
        self._session.record_failure(error)
        self._clients.refuse_all(error)
        self._clients.notify_inquirers()

    def _close(self) -> None:
        stopped = PipelineError("The pipeline was stopped during this request: start it, then send the request again.")
        self._clients.refuse_all(stopped)
        self._draft_engine.begin_stop()
        for id in self._machine.requests:
            # What was read of its prompt is kept on disk, as that of a request which its client leaves.
            self._send("target", Stop(id), None)
        self._workers.stop()
        self._draft_engine.stop()
        self._notices.close()
        unlink_owned()
        self._clients.close()
        if self._journal is not None:
            self._journal.close()
        self._trace.save()
        with suppress(OSError):
            self._session.remove()


def _unfit_text(guesses: int, right: int) -> str:
    return (
        f"Of the draft's first {guesses} guesses {right} were right, so few that it was probably trained for another "
        "target of this size, or is read wrongly. Tokens stay right, but it hardly helps: `launch-pipeline doctor "
        "--draft X --target MODEL` checks how it is read, and `launch-pipeline pairs` lists drafters by their target."
    )


def _cut_text(role: Role, cut: KvCut) -> str:
    """What a worker did not keep, and the setting that would hold it."""
    return (
        f"The {role}'s memory for KV is too small for a conversation of {cut.tokens:,} tokens: it keeps the first "
        f"{cut.kept:,}, and the next turn reads the others again. --prefix-cache-memory {(cut.memory >> 20) + 1} would "
        "hold it."
    )
