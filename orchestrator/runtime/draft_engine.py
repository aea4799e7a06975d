"""Carries out the choice of the draft's engine: prepares it, starts and ends local drafts, records the verdict."""

from contextlib import suppress

import structlog
import zmq

from orchestrator.core.commands import TrialDecided
from orchestrator.core.drafts.engine_selection import (
    EndDraft,
    EngineSelection,
    Prepare,
    RecordTrial,
    SelectionAction,
    StartDraft,
    Tell,
)
from orchestrator.machine.drafts.auto_draft import AutoDraft
from orchestrator.machine.drafts.preparation import Declined, Prepared, Preparing
from orchestrator.runtime.memory_needed import needed
from orchestrator.runtime.notices import Notice, NoticeSender
from orchestrator.runtime.preparing import PreparingProcess
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.runtime.workers.local import LocalWorkers
from orchestrator.runtime.workers.supervisor import Seat
from protocol.contracts.coreml.neural_engine import EngineChoice
from protocol.errors import InputError
from protocol.messages.base import Level
from protocol.messages.worker import Hello

log = structlog.get_logger()


class DraftEngine:
    """The thin shell of `EngineSelection`: it passes facts in and performs what comes out."""

    def __init__(
        self, setup: OrchestratorSetup, session: Session, local: LocalWorkers, poller: zmq.Poller, now: float
    ) -> None:
        assert setup.auto is not None
        self._setup = setup
        self._auto: AutoDraft = setup.auto
        second, _ = setup.second_draft
        first: EngineChoice = "mlx" if second == "coreml" else "coreml"
        self._seats: dict[EngineChoice, Seat] = {first: "draft", second: "second draft"}
        self._selection = EngineSelection(first, now)
        self._session = session
        self._local = local
        self._poller = poller
        self._notices = NoticeSender(setup.life)
        self._preparing: PreparingProcess | None = None

    # Facts ------------------------------------------------------------------------------------

    def pipeline_ready(self, level: Level) -> None:
        """`level`: of the target."""
        self._perform(self._selection.pipeline_ready(level))

    def draft_up(self, incarnation: int, hello: Hello) -> None:
        """A draft is up; it may be one of another machine."""
        engine = self._engine_in(self._local.seat_of(incarnation))
        if engine is not None:
            self._perform(self._selection.draft_up(engine, incarnation, hello.context))

    def draft_lost(self, seat: Seat, reason: str) -> None:
        engine = self._engine_in(seat)
        if engine is not None:
            self._perform(self._selection.draft_lost(engine, reason))

    def trial_decided(self, decided: TrialDecided) -> None:
        self._perform(self._selection.trial_decided(decided))

    def submitted(self, tokens: int) -> None:
        self._perform(self._selection.submitted(tokens))

    def receive(self, ready: set[int]) -> None:
        """Read what the preparation reports; `ready`: the file descriptors that the poller reports."""
        process = self._preparing
        if process is None or process.fileno() not in ready:
            return
        reports, ended = process.read()
        for report in reports:
            match report:
                case Preparing(text):
                    self._notices.send(Notice(f"Preparing the draft for the Neural Engine: {text}", "progress"))
                case Prepared():
                    self._perform(self._selection.prepared())
                case Declined(reason):
                    self._perform(self._selection.declined(reason))
        if ended:
            self._poller.unregister(process.fileno())
            process.close()
            self._preparing = None

    def deadline(self) -> float | None:
        return self._selection.deadline()

    def handle_due(self, now: float) -> None:
        self._perform(self._selection.tick(now))

    def begin_stop(self) -> None:
        """Ask the preparation to end; `stop` follows."""
        if self._preparing is not None:
            self._preparing.terminate()

    def stop(self) -> None:
        if self._preparing is not None:
            self._preparing.close()
        self._notices.close()

    # Actions ----------------------------------------------------------------------------------

    def _perform(self, actions: list[SelectionAction]) -> None:
        for action in actions:
            match action:
                case Prepare():
                    self._prepare()
                case StartDraft(engine):
                    self._local.start_worker(self._seats[engine])
                case EndDraft(engine):
                    self._local.retire(self._seats[engine])
                case RecordTrial(choice, reason, rates):
                    # Without a record the next start tries both engines again.
                    with suppress(OSError):
                        self._auto.record_trial(choice, reason, rates)
                case Tell(text, warning):
                    self._tell(text, warning)

    def _prepare(self) -> None:
        try:
            required = needed(self._setup).required_bytes
            self._preparing = PreparingProcess(self._auto, required, self._session.log("preparation"))
        except (OSError, InputError) as error:
            self._perform(self._selection.declined(f"its preparation can't be started ({error})"))
        else:
            self._poller.register(self._preparing.fileno(), zmq.POLLIN)

    def _tell(self, text: str, warning: bool) -> None:
        if warning:
            log.warning("the Neural Engine is not used", reason=text, warnings=self._selection.warnings)
        else:
            log.info("draft engine", text=text)
        self._notices.send(Notice(text, "warning" if warning else "told"))

    def _engine_in(self, seat: Seat | None) -> EngineChoice | None:
        return next((engine for engine, place in self._seats.items() if place == seat), None)
