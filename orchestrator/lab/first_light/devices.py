"""What `doctor` and `calibrate` answer: this machine, its profile, and both models at once."""

import datetime
from pathlib import Path

import msgspec

from orchestrator.lab.bench.plan import BenchModels
from orchestrator.lab.calibration import OVERLAP_WIDTH, OverlapTimes, both_at_once, calibrate, findings, to_toml
from orchestrator.lab.findings import Answer, AttachedFile, Findings, Table
from orchestrator.lab.first_light.pipelines import measured_pair, plan
from orchestrator.lab.first_light.stages import Asked, has_neural_engine
from orchestrator.machine.drafts.converted_draft import converted_draft
from orchestrator.machine.hardware import computes_on_gpu
from orchestrator.machine.profiles.device_profiles import DeviceProfile
from orchestrator.runtime.doctor import examine
from protocol.contracts.engines import DraftEngineName
from protocol.errors import PipelineError

FILE = "profile.toml"


def checks(asked: Asked) -> Findings:
    """What `doctor` checks."""
    asked.notice("checking packages, devices, memory and network")
    return Findings(checks=tuple(examine()))


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
    slow = measured.both_busy.factor
    use = f"The draft's engine is {engine}. `launch-pipeline plan --pace {FILE}` predicts with this profile."
    return msgspec.structs.replace(
        findings(measured),
        answers=(Answer("costs", f"{FILE} has them; while both compute, a forward takes {slow:.2f} times as long."),),
        notes=tuple(filter(None, (note, use))),
        attachments=(AttachedFile(FILE, to_toml(measured)),),
    )


def _calibrated(asked: Asked, engine: DraftEngineName) -> DeviceProfile:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return calibrate(None, None, engine, date=date, samples=asked.sized(1, 30), notice=asked.notice)


# Both at the same time ---------------------------------------------------------------------------------


def gain(times: OverlapTimes) -> float:
    """Work a second of both at once over that of taking turns: 2 if neither slows the other, 1 if nothing is won."""
    return times.target_alone / times.target_beside + times.draft_alone / times.draft_beside


_OVERLAP_COLUMNS = ("step", "alone, ms", "beside the other, ms", "slow-down")
_CORE_ML = "Core ML decides where it runs the draft; the stage neural-engine tells whether it is the Neural Engine."


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
    times = both_at_once(models.target, draft, engine, samples=asked.sized(2, 100), notice=asked.notice)
    won = f"At once, {where}: {gain(times):.2f} times the work a second of taking turns."
    slowest = (
        f"At once, {where}: a step of the draft takes {1e3 * times.draft_alone:.1f} ms alone, "
        f"{1e3 * times.draft_beside:.1f} ms beside the target, and one in a hundred more than "
        f"{1e3 * times.slowest:.1f} ms."
    )
    return Findings(tables=(_table(times, where),), answers=(Answer("overlap", won), Answer("contention", slowest)))


def _overlaps(models: BenchModels, note: str, *found: Findings) -> Findings:
    return Findings(
        tables=tuple(table for each in found for table in each.tables),
        answers=tuple(answer for each in found for answer in each.answers),
        notes=(*measured_pair(models), note),
    )


def _table(times: OverlapTimes, where: str) -> Table:
    rows = tuple(
        (f"{role}, {OVERLAP_WIDTH} tokens", 1e3 * alone, 1e3 * beside, beside / alone)
        for role, alone, beside in zip(("target", "draft"), times[:2], times[2:4], strict=True)
    )
    return Table(
        where[0].upper() + where[1:], _OVERLAP_COLUMNS, rows, "Medians; beside: while the other works without pause."
    )
