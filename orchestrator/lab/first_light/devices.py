"""What `doctor` and `calibrate` answer of this machine, and how long it takes to hand KV over."""

import datetime

import msgspec

from orchestrator.lab.calibration.calibrate import calibrate, findings, to_toml
from orchestrator.lab.findings import AttachedFile, Findings, Value
from orchestrator.lab.first_light.stages import Asked, has_neural_engine
from orchestrator.machine.hardware import worker_environment
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
