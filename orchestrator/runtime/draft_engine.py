"""Carries out the choice of the draft's engine: prepares it, starts and ends local drafts, records the verdict."""

import logging
import socket
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from orchestrator.core.commands import TrialDecided
from orchestrator.machine.drafts.auto_draft import AutoDraft
from orchestrator.machine.drafts.preparation import Declined, PreparationOrder, PreparationReport, Prepared, Preparing
from orchestrator.runtime.engine_selection import EngineSelection
from orchestrator.runtime.memory_plan import needed
from orchestrator.runtime.notices import Notice, NoticeSender
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.runtime.workers.pool import LocalWorkers
from orchestrator.runtime.workers.supervisor import Seat
from protocol.child_process import ChildProcess, module_command
from protocol.contracts.coreml import EngineChoice, EngineRates
from protocol.errors import InputError
from protocol.messages.base import Level
from protocol.messages.worker import Hello

_GRACE = 7.0
"""Seconds for the process to end its own processes and to remove an unfinished conversion: it gives the latter 5 s."""
log = logging.getLogger(__name__)


class DraftEngine:
    """The engine that the user chose: nothing is prepared or tried. The interface of `ChosenDraftEngine`."""

    def pipeline_ready(self, level: Level) -> None:
        """`level`: of the target."""

    def draft_up(self, incarnation: int, hello: Hello) -> None:
        """A draft is up; it may be one of another machine."""

    def draft_lost(self, seat: Seat, reason: str) -> None:
        """A local draft has ended and is not started again."""

    def trial_decided(self, decided: TrialDecided) -> None:
        """Two drafts were compared; they may be others."""

    def submitted(self, tokens: int) -> None:
        """A request with a prompt of so many tokens begins."""

    def receive(self, ready: set[int]) -> None:
        """Read what the preparation reports; `ready`: the file descriptors that the poller reports."""

    def deadline(self) -> float | None:
        """When `handle_due` must be called at the latest."""

    def handle_due(self, now: float) -> None:
        """Time has passed."""

    def begin_stop(self) -> None:
        """Ask the preparation to end; `stop` follows."""

    def stop(self) -> None:
        """End the preparation."""


class ChosenDraftEngine(DraftEngine):
    """The thin shell of `EngineSelection`: it passes facts in and has its `EngineActions`."""

    def __init__(
        self, setup: OrchestratorSetup, session: Session, local: LocalWorkers, poller: zmq.Poller, now: float
    ) -> None:
        assert setup.auto is not None
        self._setup = setup
        self._auto: AutoDraft = setup.auto
        first: EngineChoice = "coreml" if setup.draft_engine == "coreml" else "mlx"
        second: EngineChoice = "mlx" if first == "coreml" else "coreml"
        self._seats: dict[EngineChoice, Seat] = {first: "draft", second: "second draft"}
        self._selection = EngineSelection(first, now, self)
        self._session = session
        self._local = local
        self._poller = poller
        self._notices = NoticeSender(setup.life)
        self._preparing: PreparingProcess | None = None

    # Facts ------------------------------------------------------------------------------------

    def pipeline_ready(self, level: Level) -> None:
        self._selection.pipeline_ready(level)

    def draft_up(self, incarnation: int, hello: Hello) -> None:
        engine = self._engine_in(self._local.seat_of(incarnation))
        if engine is not None:
            self._selection.draft_up(engine, incarnation, hello.context)

    def draft_lost(self, seat: Seat, reason: str) -> None:
        engine = self._engine_in(seat)
        if engine is not None:
            self._selection.draft_lost(engine, reason)

    def trial_decided(self, decided: TrialDecided) -> None:
        self._selection.trial_decided(decided)

    def submitted(self, tokens: int) -> None:
        self._selection.submitted(tokens)

    def receive(self, ready: set[int]) -> None:
        process = self._preparing
        if process is None or process.fileno() not in ready:
            return
        reports, ended = process.news()
        for report in reports:
            match report:
                case Preparing(text):
                    self._notices.send(Notice(f"Preparing the draft for the Neural Engine: {text}", "progress"))
                case Prepared():
                    self._selection.prepared()
                case Declined(reason):
                    self._selection.declined(reason)
        if ended:
            self._poller.unregister(process.fileno())
            process.close()
            self._preparing = None

    def deadline(self) -> float | None:
        return self._selection.deadline()

    def handle_due(self, now: float) -> None:
        self._selection.tick(now)

    def begin_stop(self) -> None:
        if self._preparing is not None:
            self._preparing.terminate()

    def stop(self) -> None:
        if self._preparing is not None:
            self._preparing.close()
        self._notices.close()

    # Actions ----------------------------------------------------------------------------------

    def prepare(self) -> None:
        try:
            required = needed(self._setup).required_bytes
            self._preparing = PreparingProcess(self._auto, required, self._session.log("preparation"))
        except (OSError, InputError) as error:
            self._selection.declined(f"its preparation can't be started ({error})")
        else:
            self._poller.register(self._preparing.fileno(), zmq.POLLIN)

    def start_draft(self, engine: EngineChoice) -> None:
        self._local.start_worker(self._seats[engine])

    def end_draft(self, engine: EngineChoice) -> None:
        self._local.supervisor.retire(self._seats[engine])

    def record_trial(self, choice: EngineChoice, reason: str, rates: EngineRates) -> None:
        # Without a record the next start tries both engines again.
        with suppress(OSError):
            self._auto.record_trial(choice, reason, rates)

    def tell(self, text: str, warning: bool = False) -> None:
        log.log(logging.WARNING if warning else logging.INFO, "%s", text)
        self._notices.send(Notice(text, "warning" if warning else "told"))

    def _engine_in(self, seat: Seat | None) -> EngineChoice | None:
        return next((engine for engine, place in self._seats.items() if place == seat), None)


class PreparingProcess(ChildProcess):
    """The process that prepares the draft for the Neural Engine, as the orchestrator holds it.

    Runs from its construction on. Both processes read end of file from a socket pair when the other one ends."""

    def __init__(self, auto: AutoDraft, needed: int, log: Path) -> None:
        """`needed`: bytes that the pipeline needs without Core ML."""
        self._life, theirs = socket.socketpair()
        self._concluded = False
        order = PreparationOrder(auto=auto, needed=needed, life=theirs.fileno())
        command = [*module_command("orchestrator.machine.drafts.preparation"), msgspec.json.encode(order).decode()]
        with theirs:
            super().__init__(command, inherited=[theirs.fileno()], words=log.open("w+b"))

    def news(self) -> tuple[list[PreparationReport], bool]:
        """The next reports, and whether they were the last ones."""
        found = self.read(PreparationReport)
        reports = found or []
        self._concluded = self._concluded or any(not isinstance(report, Preparing) for report in reports)
        if found is None and not self._concluded:
            words = self.last_words
            reports.append(Declined(f"its preparation ended unexpectedly; its last words: {words}"))
        return reports, found is None

    def close(self) -> None:
        """End the process and all that it has started."""
        with self._life, self:
            self.end(_GRACE)
