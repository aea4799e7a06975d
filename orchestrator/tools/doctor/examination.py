"""Runs the stages of an examination of the Neural Engine, each in a process that may crash or hang."""

import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from protocol.contracts.examination import Broken, ExaminationOrder, ExaminationReport, RuntimeName, Stage, Units

EXAMINER = (sys.executable, "-m", "draft_worker.coreml.examine")
PREDICTS = 300
_PREDICTS_ON_PROCESSOR = 60
"""Enough for a time to compare with the Neural Engine's."""
_TIMEOUT_SECONDS = 300.0
"""Without output for this time a stage counts as hung: the first load of a large model takes minutes."""


@dataclass(frozen=True, slots=True)
class StageOutcome:
    """The outcome of one stage."""

    stage: Stage
    units: Units
    reports: tuple[ExaminationReport, ...]
    ending: Literal["done", "broken", "crashed", "hung"]
    text: str = ""
    """The reason of a bad ending, without a subject."""

    def of(self, kind: type) -> list:
        """Reports of one kind."""
        return [report for report in self.reports if isinstance(report, kind)]


def examine(
    folder: Path,
    runtime: RuntimeName,
    *,
    examiner: Sequence[str] = EXAMINER,
    patience: float = _TIMEOUT_SECONDS,
    predicts: int = PREDICTS,
    on_stage: Callable[[str], None] = lambda _: None,
) -> list[StageOutcome]:
    """The outcome of every stage; without the executor's logits the later stages are skipped.

    `on_stage` is called with a description of each stage; `examiner` is the program that runs a stage.
    """
    outcomes: list[StageOutcome] = []
    with tempfile.TemporaryDirectory() as room:
        for words, stage, units, count in _stages(predicts):
            on_stage(words)
            order = ExaminationOrder(
                folder=str(folder),
                stage=stage,
                golden=str(Path(room) / "golden.npz"),
                runtime=runtime,
                units=units,
                predicts=count,
            )
            outcomes.append(_run(order, examiner, patience))
            if stage == "golden" and outcomes[-1].ending != "done":
                break
    return outcomes


def _stages(predicts: int) -> list[tuple[str, Stage, Units, int]]:
    few = min(predicts, _PREDICTS_ON_PROCESSOR)
    return [
        ("the executor's logits", "golden", "CPU_AND_NE", 0),
        (f"{predicts} predicts on the Neural Engine", "predict", "CPU_AND_NE", predicts),
        (f"{few} predicts on the processor", "predict", "CPU_ONLY", few),
        ("where Core ML would run what", "plan", "CPU_AND_NE", 0),
    ]


def _run(order: ExaminationOrder, examiner: Sequence[str], patience: float) -> StageOutcome:
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            [*examiner, msgspec.json.encode(order).decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=words,
        )
        try:
            reports, hung = _read(process, patience)
        finally:
            process.kill()
            code = process.wait()
        words.seek(0)
        last = words.read().decode(errors="replace").strip().splitlines()[-1:]
    broken = next((report.text for report in reports if isinstance(report, Broken)), None)
    if hung:
        return StageOutcome(order.stage, order.units, reports, "hung", f"said nothing for {patience:.0f} s")
    if broken is not None:
        return StageOutcome(order.stage, order.units, reports, "broken", broken)
    if code:
        cause = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return StageOutcome(order.stage, order.units, reports, "crashed", " ".join([cause, *last]))
    return StageOutcome(order.stage, order.units, reports, "done")


def _read(process: subprocess.Popen[bytes], patience: float) -> tuple[tuple[ExaminationReport, ...], bool]:
    """All reports, and whether the process hung. Collects the exit code if the process ends."""
    assert process.stdout is not None
    pending, reports = b"", []
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(patience):
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                return tuple(reports), not _ends(process, patience)
            *lines, pending = (pending + piece).split(b"\n")
            reports += map(_report, lines)
    return tuple(reports), True


def _report(line: bytes) -> ExaminationReport:
    """A line that is no report, for instance of a library, breaks the stage."""
    try:
        return msgspec.json.decode(line, type=ExaminationReport)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Broken(f"it said what is no report: {line[:80]!r}")


def _ends(process: subprocess.Popen[bytes], patience: float) -> bool:
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        return False
    return True
