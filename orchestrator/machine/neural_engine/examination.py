"""Runs the stages of an examination of the Neural Engine, each in a process that may crash or hang."""

import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from protocol.child_process import ChildProcess, module_command
from protocol.contracts.coreml import (
    Broken,
    ExaminationOrder,
    ExaminationReport,
    Loading,
    RuntimeName,
    Stage,
    Units,
)

EXAMINER = module_command("draft_worker.coreml.examine")
PREDICTS = 300
_PREDICTS_ON_PROCESSOR = 60
"""Enough for a time to compare with the Neural Engine's."""
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""A process does not end itself by these, so they say nothing about the model: memory was short, or a user ended it."""

OnStage: TypeAlias = Callable[[str], None]
"""Called with a description of what is being done."""


class Limits(NamedTuple):
    """Seconds."""

    silence: float = 300.0
    """Without a report for this time a stage hangs, unless something is being loaded."""
    loading: float = 3600.0
    """The most that one function may take to load. The Neural Engine's compiler has taken ten minutes for a large one
    (argmax-oss-swift, issue 309), without a word."""
    progress: float = 60.0
    """How often a load that goes on is told."""


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class StageOutcome:
    """The outcome of one stage."""

    stage: Stage
    units: Units
    reports: tuple[ExaminationReport, ...]
    ending: Literal["done", "broken", "crashed", "hung"]
    text: str = ""
    """The reason of a bad ending, without a subject."""
    lasting: bool = True
    """A bad ending is due to the model or the system, so that it is worth remembering. Silence never is."""
    beside: bool = False
    """The GPU was busy meanwhile: its times say what the draft costs there, and decide nothing."""

    def of(self, kind: type) -> list:
        """Reports of one kind."""
        return [report for report in self.reports if isinstance(report, kind)]


def examine(
    folder: Path,
    runtime: RuntimeName,
    *,
    examiner: Sequence[str] = EXAMINER,
    limits: Limits = LIMITS,
    predicts: int = PREDICTS,
    on_stage: OnStage = lambda _: None,
    busy: Callable[[], AbstractContextManager[object]] | None = None,
) -> list[StageOutcome]:
    """The outcome of every stage; without the executor's logits the later stages are skipped.

    `examiner` is the program that runs a stage. With `busy`, which keeps the GPU busy as long as its context lasts, the
    predicts on the Neural Engine are repeated beside that.
    """
    outcomes: list[StageOutcome] = []
    with tempfile.TemporaryDirectory() as room:

        def run(words: str, stage: Stage, units: Units, count: int) -> StageOutcome:
            on_stage(words)
            order = ExaminationOrder(
                folder=str(folder),
                stage=stage,
                golden=str(Path(room) / "golden.npz"),
                runtime=runtime,
                units=units,
                predicts=count,
            )
            return _run(order, examiner, limits, on_stage)

        for each in _stages(predicts):
            outcomes.append(run(*each))
            if each[1] == "golden" and outcomes[-1].ending != "done":
                return outcomes
        if busy is not None:
            with busy():
                words = f"{predicts} predicts on the Neural Engine beside a busy GPU"
                outcomes.append(replace(run(words, "predict", "CPU_AND_NE", predicts), beside=True))
    return outcomes


def _stages(predicts: int) -> list[tuple[str, Stage, Units, int]]:
    few = min(predicts, _PREDICTS_ON_PROCESSOR)
    return [
        ("the executor's logits", "golden", "CPU_AND_NE", 0),
        (f"{predicts} predicts on the Neural Engine", "predict", "CPU_AND_NE", predicts),
        (f"{few} predicts on the processor", "predict", "CPU_ONLY", few),
        ("where Core ML would run what", "plan", "CPU_AND_NE", 0),
    ]


def _run(order: ExaminationOrder, examiner: Sequence[str], limits: Limits, on_stage: OnStage) -> StageOutcome:
    command = [*examiner, msgspec.json.encode(order).decode()]
    with ChildProcess(command, session=False) as process:
        try:
            reports, silence = _Reader(process, order.units, limits, on_stage).read()
        finally:
            process.end(by=signal.SIGKILL)
        code, last = process.wait() or 0, process.words().strip().splitlines()[-1:]
    broken = next((report for report in reports if isinstance(report, Broken)), None)
    if silence:
        return StageOutcome(order.stage, order.units, reports, "hung", silence, lasting=False)
    if broken is not None:
        return StageOutcome(order.stage, order.units, reports, "broken", broken.text, broken.lasting)
    if code:
        cause = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        lasting = code < 0 and -code not in _FROM_OUTSIDE
        return StageOutcome(order.stage, order.units, reports, "crashed", " ".join([cause, *last]), lasting)
    return StageOutcome(order.stage, order.units, reports, "done")


class _Reader:
    """Reads a stage's reports until it ends or is silent for too long."""

    def __init__(self, process: ChildProcess, units: Units, limits: Limits, on_stage: OnStage) -> None:
        self._process = process
        self._units = units
        self._limits = limits
        self._on_stage = on_stage
        self._reports: list[ExaminationReport] = []
        self._heard_at = time.monotonic()

    def read(self) -> tuple[tuple[ExaminationReport, ...], str]:
        """All reports, and what is to be said of a process that did not end; empty if it did."""
        silence = self._read()
        return tuple(self._reports), silence

    @property
    def _loading(self) -> str:
        """What is being loaded; empty if nothing is."""
        last = self._reports[-1] if self._reports else None
        if not isinstance(last, Loading):
            return ""
        what = "the package" if last.width is None else f"width {last.width}"
        return f"compiling {what} for the {'Neural Engine' if self._units == 'CPU_AND_NE' else 'processor'}"

    def _read(self) -> str:
        while (found := self._process.read(ExaminationReport, self._next_look())) is not None:
            if found:
                self._reports += found
                self._heard_at = time.monotonic()
            elif words := self._still_silent():
                return words
        return "" if self._process.wait(self._limits.silence) is not None else self._hung(self._limits.silence)

    def _next_look(self) -> float:
        """Seconds until a silent process is given up, or until its load is told again."""
        limit = self._limits.loading if self._loading else self._limits.silence
        left = max(0.0, self._heard_at + limit - time.monotonic())
        return min(left, self._limits.progress) if self._loading else left

    def _still_silent(self) -> str:
        """Tell of a load that goes on; the reason if the process is given up."""
        silent = time.monotonic() - self._heard_at
        if not self._loading:
            return self._hung(silent) if silent >= self._limits.silence else ""
        if silent >= self._limits.loading:
            return f"was ended after {silent / 60:.0f} min of {self._loading}; a package with fewer widths takes less"
        self._on_stage(f"{self._loading}, {silent / 60:.0f} min so far")
        return ""

    def _hung(self, seconds: float) -> str:
        return f"said nothing for {seconds:.0f} s"
