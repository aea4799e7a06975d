"""What `doctor --neural-engine` examines: placement, numerics, latency by width, and what loading takes."""

import resource
import sys
from collections.abc import Iterator, Sequence

import msgspec

from orchestrator.lab.findings import Cell, Findings, Table, Value
from orchestrator.lab.first_light.measurements.texts import plan
from orchestrator.lab.first_light.stages import Asked
from orchestrator.machine.check import Check
from orchestrator.machine.drafts.converted_draft import converted_draft
from orchestrator.machine.drafts.draft_choice import place_of
from orchestrator.machine.neural_engine.examination import EXAMINER, PREDICTS, StageOutcome, examine
from orchestrator.machine.neural_engine.judgement import judge
from protocol.contracts.coreml.examination import RuntimeName
from protocol.contracts.coreml.neural_engine import record

_MIB = 1 << 20


def measure(asked: Asked) -> Findings:
    return examination(asked, "coreml", EXAMINER)


def examination(asked: Asked, runtime: RuntimeName, examiner: Sequence[str]) -> Findings:
    """The findings of every stage of the examination. The verdict is kept for `--draft-engine coreml`."""
    folder = converted_draft(str(plan().models().draft), lambda report: asked.notice(report.stage))
    predicts = asked.sized(30, PREDICTS)
    outcomes = examine(folder, runtime, examiner=examiner, predicts=predicts, on_stage=asked.notice)
    found, verdict = judge(outcomes, place_of(folder), rehearsal=runtime == "executor")
    if runtime == "coreml" and verdict is not None:
        record(verdict)
    told = "none: the failure may not come again" if verdict is None else f"{verdict.choice}: {verdict.reason}"
    return Findings(
        values=(_peak_memory(),),
        tables=tuple(report_tables(outcomes)),
        checks=(*map(_check, found), Check("verdict", "ok", told)),
    )


def report_tables(outcomes: Sequence[StageOutcome]) -> Iterator[Table]:
    """Every kind of report as a table, so that a new kind is shown without being known here."""
    for outcome in outcomes:
        for kind in dict.fromkeys(type(report) for report in outcome.reports):
            fields = [field.name for field in msgspec.structs.fields(kind)]
            if fields:
                rows = tuple(tuple(_cell(getattr(report, name)) for name in fields) for report in outcome.of(kind))
                yield Table(f"{outcome.units}, {outcome.stage}: {kind.__name__.lower()}", tuple(fields), rows)


def _check(finding: Check) -> Check:
    """A Neural Engine that does not suit is no defect: the pipeline then drafts with MLX."""
    return msgspec.structs.replace(finding, status="warn") if finding.status == "fail" else finding


def _peak_memory() -> Value:
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    # Bytes on macOS, KiB on Linux: getrusage(2) of either.
    return Value(
        "largest resident memory of a process of this stage", peak / (_MIB if sys.platform == "darwin" else 1024), "MiB"
    )


def _cell(value: object) -> Cell:
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, dict):
        return ", ".join(f"{count} {kind}" for kind, count in value.items()) or "none"
    return str(value)
