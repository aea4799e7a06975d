"""What `doctor --neural-engine` examines: placement, numerics, latency by width, and what loading takes."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from orchestrator.lab.findings import Answer, Cell, Findings, Table
from orchestrator.lab.first_light.pipelines import plan
from orchestrator.lab.first_light.stages import Asked
from orchestrator.lab.forwards import ForwardOrder, examined
from orchestrator.machine.check import Check
from orchestrator.machine.drafts.converted_draft import conversion, converted_draft
from orchestrator.machine.drafts.draft_choice import place_of
from orchestrator.machine.neural_engine import EXAMINER, PREDICTS, StageOutcome, examine
from protocol.contracts.coreml import Choices, Loaded, Loading, Progress, RuntimeName, Timed, record
from protocol.errors import PipelineError

_SHORT_CACHE = 512
_BUSY_WIDTH, _ENDLESS = 8, 10**9
"""Tokens of a forward that keeps the GPU busy, and how many of them there are: the process is ended."""


def measure(asked: Asked) -> Findings:
    return examination(asked, "coreml", EXAMINER)


def examination(asked: Asked, runtime: RuntimeName, examiner: Sequence[str]) -> Findings:
    """The findings of every stage of the examination. The verdict is kept for `--draft-engine coreml`."""
    models = plan().models()
    folder = converted_draft(str(models.draft), lambda report: asked.notice(report.stage))
    outcomes, found, verdict = examine(
        folder,
        place_of(folder),
        runtime,
        examiner=examiner,
        predicts=asked.sized(30, PREDICTS),
        on_stage=asked.notice,
        busy=lambda: _busy_target(models.target),
    )
    if runtime == "coreml":
        record(verdict)
    examined = Findings(
        tables=tuple(report_tables(outcomes)),
        checks=(*map(_check, found), Check("verdict", "ok", f"{verdict.choice}: {verdict.reason}")),
        answers=tuple(sentences(outcomes)),
    )
    asked.so_far(examined)
    try:
        shorter = _with_shorter_cache(asked, models.draft, runtime, examiner)
    except PipelineError as error:
        return msgspec.structs.replace(examined, notes=(f"A shorter cache: not measured. {error}",))
    answers = (*examined.answers, *_compared(_times(outcomes), _times(shorter)))
    return msgspec.structs.replace(examined, answers=answers)


def _with_shorter_cache(
    asked: Asked, draft: Path, runtime: RuntimeName, examiner: Sequence[str]
) -> Sequence[StageOutcome]:
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room) / "package"
        for report in conversion(draft, folder, Choices(widths=(1, 8), context=_SHORT_CACHE)):
            asked.notice(f"a shorter cache: {report.stage if isinstance(report, Progress) else 'converted'}")
        predicts = asked.sized(30, 60)
        return examine(
            folder, place_of(folder), runtime, examiner=examiner, predicts=predicts, on_stage=asked.notice
        ).outcomes


def _times(outcomes: Sequence[StageOutcome]) -> dict[int, float]:
    """Milliseconds of a predict on the Neural Engine by width."""
    alone = [each for each in outcomes if each.stage == "predict" and each.units == "CPU_AND_NE" and not each.beside]
    return {timed.width: timed.milliseconds for each in alone for timed in each.of(Timed)}


def _compared(usual: Mapping[int, float], shorter: Mapping[int, float]) -> Iterator[Answer]:
    for width in usual.keys() & shorter.keys():
        yield Answer(
            "cache length",
            f"A predict of width {width} takes {shorter[width]:.2f} ms with a KV cache of {_SHORT_CACHE} tokens, and "
            f"{usual[width]:.2f} ms with the usual one.",
        )


@contextmanager
def _busy_target(target: Path) -> Iterator[None]:
    """The target computes forwards without a pause as long as the context lasts."""
    order = ForwardOrder(folder=str(target), timed=(_BUSY_WIDTH,), contexts=(32,), samples=_ENDLESS)
    with closing(examined(order)) as reports:
        next(reports)
        yield


def sentences(outcomes: Sequence[StageOutcome]) -> Iterator[Answer]:
    """Which widths of the package load on the Neural Engine, in what time, in a second process too, and what a predict
    takes, beside a busy GPU too."""
    engine = [each for each in outcomes if each.stage == "predict" and each.units == "CPU_AND_NE"]
    alone = next((each for each in engine if not each.beside), None)
    if alone is None:
        return
    loaded: list[Loaded] = alone.of(Loaded)
    for each in engine:
        words = "again in a new process" if each.beside else "on the Neural Engine, compiled if need be"
        if times := ", ".join(f"width {one.width} in {one.seconds:.1f} s" for one in each.of(Loaded)):
            yield Answer("package loads", f"The package loads {words}: {times}.")
    begun = [each.width for each in alone.of(Loading) if each.width is not None]
    if alone.ending != "done" and len(begun) > len(loaded):
        yield Answer("package loads", f"Its width {begun[-1]} does not load on the Neural Engine: {alone.text}.")
    beside = {timed.width: timed.milliseconds for each in engine if each.beside for timed in each.of(Timed)}
    for timed in alone.of(Timed):
        if timed.width in beside:
            more = beside[timed.width] / timed.milliseconds
            yield Answer(
                "predicts",
                f"A predict of width {timed.width} on the Neural Engine takes {timed.milliseconds:.2f} ms, and "
                f"{beside[timed.width]:.2f} ms beside a busy GPU ({more:.2f} times).",
            )


def report_tables(outcomes: Sequence[StageOutcome]) -> Iterator[Table]:
    """Every kind of report as a table, so that a new kind is shown without being known here."""
    for outcome in outcomes:
        for kind in dict.fromkeys(map(type, outcome.reports)):
            rows = tuple(tuple(map(_cell, msgspec.structs.astuple(report))) for report in outcome.of(kind))
            beside = " beside a busy GPU" if outcome.beside else ""
            title = f"{outcome.units}, {outcome.stage}{beside}: {kind.__name__.lower()}"
            if columns := kind.__struct_fields__:
                yield Table(title, columns, rows)


def _check(finding: Check) -> Check:
    """A Neural Engine that does not suit is no defect: the pipeline then drafts with MLX."""
    return msgspec.structs.replace(finding, status="warn") if finding.status == "fail" else finding


def _cell(value: object) -> Cell:
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, dict):
        return ", ".join(f"{count} {kind}" for kind, count in value.items()) or "none"
    return str(value)
