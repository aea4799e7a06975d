"""What `doctor` and `calibrate` answer: this machine, its profile, and both models at once; and handing KV over."""

import datetime
from collections.abc import Iterator
from pathlib import Path

import msgspec

from orchestrator.lab.bench.plan import BenchModels
from orchestrator.lab.calibration import OVERLAP_WIDTH, OverlapTimes, both_at_once, calibrate, findings, to_toml
from orchestrator.lab.findings import AttachedFile, Findings, Table, Value
from orchestrator.lab.first_light.pipelines import measured_pair, plan
from orchestrator.lab.first_light.stages import Asked, has_neural_engine
from orchestrator.machine.drafts.converted_draft import converted_draft
from orchestrator.machine.hardware import computes_on_gpu, worker_environment
from orchestrator.machine.profiles.device_profiles import DeviceProfile
from orchestrator.runtime.doctor import examine
from protocol.child_process import reports
from protocol.contracts.engines import DraftEngineName
from protocol.errors import PipelineError

FILE = "profile.toml"
_GRACE = 10.0
"""Seconds from the program's figures to its end."""
_OTHERS = Value(
    "KV injected into mlx-lm's cache",
    0.2,
    "ms",
    "reported",
    "M4, Qwen2.5-3B, by assignment: no shared memory, no check",
)


class AdoptionOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last argument of `adoption`, in JSON."""

    tokens: tuple[int, ...] = (40, 512, 4096)
    repeats: int = 9


def checks(asked: Asked) -> Findings:
    """What `doctor` checks."""
    asked.notice("checking packages, devices, memory and network")
    return Findings(checks=tuple(examine()))


def hand_off(asked: Asked) -> Findings:
    """How long a target takes to adopt the KV of another process, on one core."""
    asked.notice("adopting KV from shared memory")
    order = AdoptionOrder(tokens=(40,), repeats=2) if asked.settings.short else AdoptionOrder()
    one_core = worker_environment("draft", (0,))
    program, name = "orchestrator.lab.first_light.adoption", "The adoption of KV"
    (values,) = reports(program, order, list[Value], name=name, grace=_GRACE, variables=one_core)
    return Findings(values=(*values, _OTHERS))


def profile(asked: Asked) -> Findings:
    """What forwards of target and draft take in their workers: the device profile that `calibrate` writes."""
    engine, note = ("coreml" if has_neural_engine() else "mlx"), ""
    try:
        measured = _calibrated(asked, engine)
    except PipelineError as error:
        if engine == "mlx":
            raise
        engine, note = "mlx", f"The draft in Core ML was not measured. {error}"
        measured = _calibrated(asked, engine)
    use = f"The draft's engine is {engine}. `launch-pipeline plan --pace {FILE}` predicts with this profile."
    return msgspec.structs.replace(
        findings(measured),
        notes=tuple(filter(None, (note, use))),
        attachments=(AttachedFile(FILE, to_toml(measured)),),
    )


def _calibrated(asked: Asked, engine: DraftEngineName) -> DeviceProfile:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return calibrate(None, None, engine, date=date, samples=asked.sized(1, 30), notice=asked.notice)


# Both at the same time ---------------------------------------------------------------------------------


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


_OVERLAP_COLUMNS = ("step", "alone, ms", "beside the other, ms", "slow-down")
_CORE_ML = "Core ML decides where it runs the draft; the stage neural-engine tells whether it is the Neural Engine."
_OTHER_OVERLAPS = (
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


def overlap(asked: Asked) -> Findings:
    """Draft and target at the same time: what each loses, and what is won over taking turns."""
    models = plan().models()
    where = "both on the GPU" if computes_on_gpu() else "each on its own cores"
    found = _overlapping(asked, models, models.draft, "mlx", where)
    if not has_neural_engine():
        return _overlaps(models, "GPU and Neural Engine: not here, no Neural Engine with Core ML.", found)
    asked.so_far(_overlaps(models, "GPU and Neural Engine: not measured.", found))
    try:
        draft = converted_draft(str(models.draft), lambda report: asked.notice(report.stage))
        beside = _overlapping(asked, models, draft, "coreml", "target on the GPU, draft in Core ML")
    except PipelineError as error:
        return _overlaps(models, f"GPU and Neural Engine: not measured. {error}", found)
    return _overlaps(models, _CORE_ML, beside, found)


def _overlapping(asked: Asked, models: BenchModels, draft: Path, engine: DraftEngineName, where: str) -> Findings:
    """`draft`: what `engine` runs. `where`: where both compute."""
    times = both_at_once(models.target, draft, engine, samples=asked.sized(2, 30), notice=asked.notice)
    return Findings(values=tuple(_values(times, where)), tables=(_table(times, where),))


def _overlaps(models: BenchModels, note: str, *found: Findings) -> Findings:
    return Findings(
        values=(*(value for each in found for value in each.values), *_OTHER_OVERLAPS),
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
    rows = tuple(
        (f"{role}, {OVERLAP_WIDTH} tokens", 1e3 * alone, 1e3 * beside, beside / alone)
        for role, alone, beside in zip(("target", "draft"), times[:2], times[2:], strict=True)
    )
    return Table(
        where[0].upper() + where[1:], _OVERLAP_COLUMNS, rows, "Medians; beside: while the other works without pause."
    )
