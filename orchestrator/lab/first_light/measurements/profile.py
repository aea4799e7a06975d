"""What forwards of target and draft take in their workers: the device profile that `calibrate` writes."""

import datetime

import msgspec

from orchestrator.lab.calibration import calibrate, findings, to_toml
from orchestrator.lab.findings import AttachedFile, Findings
from orchestrator.lab.first_light.needs import has_neural_engine
from orchestrator.lab.first_light.stages import Asked
from orchestrator.machine.profiles.device_profiles import DeviceProfile
from protocol.contracts.engines import DraftEngineName
from protocol.errors import PipelineError

FILE = "profile.toml"


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
    return msgspec.structs.replace(
        findings(profile),
        notes=tuple(filter(None, (note, use))),
        attachments=(AttachedFile(FILE, to_toml(profile)),),
    )


def _profile(asked: Asked, engine: DraftEngineName) -> DeviceProfile:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return calibrate(None, None, engine, date=date, samples=asked.sized(1, 30), notice=asked.notice)
