"""What forwards of target and draft take in their workers: the device profile that `calibrate` writes."""

import datetime
from collections.abc import Iterator

from orchestrator.lab.calibration.calibrate import calibrate, to_toml
from orchestrator.lab.findings import Attachment, Cell, Findings, Table, Value
from orchestrator.lab.first_light.asked import Asked
from orchestrator.lab.first_light.needs import has_neural_engine
from orchestrator.machine.profiles.device_profiles import DeviceProfile, DeviceTimes
from protocol.contracts.engines import DraftEngineName
from protocol.errors import PipelineError

FILE = "profile.toml"
_NOTE = "A target's forward verifies that many tokens; a draft's is a growth step over that many nodes. Medians."


def measure(asked: Asked) -> Findings:
    engine, note = ("coreml" if has_neural_engine() else "mlx"), ""
    try:
        profile = _profile(asked, engine)
    except PipelineError as error:
        if engine == "mlx":
            raise
        engine, note = "mlx", f"The draft in Core ML was not measured. {error}"
        profile = _profile(asked, engine)
    use = f"The draft's engine is {engine}. `launch-pipeline plan --pace {FILE}` predicts with this profile."
    return Findings(
        values=tuple(_values(profile)),
        tables=(_costs(profile),),
        notes=tuple(filter(None, (note, use))),
        attachments=(Attachment(FILE, to_toml(profile)),),
    )


def _profile(asked: Asked, engine: DraftEngineName) -> DeviceProfile:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return calibrate(None, None, engine, date=date, samples=asked.sized(1, 30), notice=asked.notice)


def _costs(profile: DeviceProfile) -> Table:
    times = {
        name: {step.width: step.milliseconds for step in device.steps} for name, device in _devices(profile).items()
    }
    widths = sorted({width for steps in times.values() for width in steps})
    rows: list[tuple[Cell, ...]] = [(width, *(steps.get(width) for steps in times.values())) for width in widths]
    return Table("Forwards by width", ("tokens", *(f"{name}, ms" for name in times)), tuple(rows), _NOTE)


def _values(profile: DeviceProfile) -> Iterator[Value]:
    yield Value("slow-down while both compute", profile.both_busy.factor, "×")
    for name, device in _devices(profile).items():
        yield Value(f"{name}: prompt", device.prefill.tokens_per_second, "tokens/s")
        if device.weights is not None:
            yield Value(f"{name}: weights that a forward reads", device.weights / 1e6, "MB", "computed")


def _devices(profile: DeviceProfile) -> dict[str, DeviceTimes]:
    """By what computes there."""
    return {
        "target": profile.target,
        "draft": profile.draft,
        "draft on the target's device": profile.draft_on_target_device,
    }
