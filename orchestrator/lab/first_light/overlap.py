"""Draft and target at the same time: what each loses, and what is won over taking turns."""

from collections.abc import Iterator
from pathlib import Path

from orchestrator.lab.bench.models import BenchModels
from orchestrator.lab.calibration.calibrate import OVERLAP_WIDTHS, OverlapTimes, both_at_once
from orchestrator.lab.findings import Findings, Table, Value
from orchestrator.lab.first_light.pipelines import measured_pair, plan
from orchestrator.lab.first_light.stages import Asked, has_neural_engine
from orchestrator.machine.drafts.converted_draft import converted_draft
from orchestrator.machine.hardware import computes_on_gpu
from protocol.contracts.engines import DraftEngineName
from protocol.errors import PipelineError


def pair_seconds(times: OverlapTimes) -> float:
    """One step of each, begun together: both slowed down until the shorter one ends, then the other alone."""
    first, last = sorted(
        ((times.target_beside, times.target_alone), (times.draft_beside, times.draft_alone)),
    )
    done = first[0] / last[0]
    return first[0] + last[1] * (1 - done)


def efficiency(one: float, other: float, together: float) -> float:
    """The share of the shorter step that is hidden: 1 if it costs nothing, 0 if both take as long as in turns.

    An M4 was reported to take 22.1 ms for a step of each in turns and 16.8 ms at once, at 73%: with 7.3 ms for the
    Neural Engine's step, (22.1 - 16.8) / 7.3.
    """
    return (one + other - together) / min(one, other)


def gain(times: OverlapTimes) -> float:
    """Work a second of both at once over that of taking turns: 2 if neither slows the other, 1 if nothing is won."""
    return times.target_alone / times.target_beside + times.draft_alone / times.draft_beside


_COLUMNS = ("step", "alone, ms", "beside the other, ms", "slow-down")
_CORE_ML = "Core ML decides where it runs the draft; the stage neural-engine tells whether it is the Neural Engine."
_OTHERS = (
    Value(
        "speed-up of a pair of steps, GPU and Neural Engine",
        1.32,
        "×",
        "reported",
        "M4: 22.1 ms in turns, 16.8 at once",
    ),
    Value("overlap efficiency, GPU and Neural Engine", 73, "%", "reported", "M4, the same"),
    Value("the GPU's loss beside a busy Neural Engine, from", 3, "%", "reported", "M5 Pro"),
    Value("the GPU's loss beside a busy Neural Engine, to", 18, "%", "reported", "larql, pull request 312"),
)


def measure(asked: Asked) -> Findings:
    models = plan().models()
    where = "both on the GPU" if computes_on_gpu() else "each on its own cores"
    found = _measured(asked, models, models.draft, "mlx", where)
    if not has_neural_engine():
        return _told(models, "GPU and Neural Engine: not here, no Neural Engine with Core ML.", found)
    asked.so_far(_told(models, "GPU and Neural Engine: not measured.", found))
    try:
        draft = converted_draft(str(models.draft), lambda report: asked.notice(report.stage))
        beside = _measured(asked, models, draft, "coreml", "target on the GPU, draft in Core ML")
    except PipelineError as error:
        return _told(models, f"GPU and Neural Engine: not measured. {error}", found)
    return _told(models, _CORE_ML, beside, found)


def _measured(asked: Asked, models: BenchModels, draft: Path, engine: DraftEngineName, where: str) -> Findings:
    """`draft`: what `engine` runs. `where`: where both compute."""
    times = both_at_once(models.target, draft, engine, samples=asked.sized(2, 30), notice=asked.notice)
    return Findings(values=tuple(_values(times, where)), tables=(_table(times, where),))


def _told(models: BenchModels, note: str, *found: Findings) -> Findings:
    return Findings(
        values=(*(value for each in found for value in each.values), *_OTHERS),
        tables=tuple(table for each in found for table in each.tables),
        notes=(*measured_pair(models), note),
    )


def _values(times: OverlapTimes, where: str) -> Iterator[Value]:
    target, draft, pair = times.target_alone, times.draft_alone, pair_seconds(times)
    formula = "(target alone + draft alone) / time of one step of each, begun together"
    yield Value(f"speed-up of a pair of steps, {where}", (target + draft) / pair, "×", "computed", formula)
    formula = "(target alone + draft alone - together) / the shorter one"
    yield Value(f"overlap efficiency, {where}", 100 * efficiency(target, draft, pair), "%", "computed", formula)
    formula = "1 / the target's slow-down + 1 / the draft's; 2 if neither loses anything"
    yield Value(f"work a second over taking turns, {where}", gain(times), "×", "computed", formula)


def _table(times: OverlapTimes, where: str) -> Table:
    names = (f"{role}, {width} tokens" for role, width in zip(("target", "draft"), OVERLAP_WIDTHS, strict=True))
    rows = tuple(
        (name, 1e3 * alone, 1e3 * beside, beside / alone)
        for name, alone, beside in zip(names, times[:2], times[2:], strict=True)
    )
    return Table(where[0].upper() + where[1:], _COLUMNS, rows, "Medians; beside: while the other works without pause.")
