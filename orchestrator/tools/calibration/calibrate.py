"""A profile of this machine from start to end: starts the workers, has them measured, ends them. Prints nothing."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from orchestrator.core.options import Options
from orchestrator.machine import hardware as machine_facts
from orchestrator.machine.checkpoints import resolve
from orchestrator.machine.converted_draft import converted_draft
from orchestrator.machine.device_profiles import DeviceProfile
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.tools.calibration.measure import OnCalibrationProgress, Times, draft_alone, slow_down, target_alone
from orchestrator.tools.calibration.rig import Rig
from orchestrator.tools.calibration.toml_writer import device_times, slowed
from orchestrator.tools.pairs import weights_in
from protocol.contracts.engines import DraftEngineName, draft_model
from protocol.messages.base import Role

Cores = Mapping[Role, tuple[int, ...]]


def calibrate(
    target: str | None,
    draft: str | None,
    engine: DraftEngineName,
    *,
    date: str,
    samples: int,
    notice: OnCalibrationProgress,
) -> DeviceProfile:
    """Measure this pair on this machine; the draft on its own device by `engine`, and by MLX on the target's.

    `date` is written beside each number; `samples` forwards are measured of each kind; `notice` is told what
    is measured now. Raises InputError for models that can't be had, PipelineError if a worker fails.
    """
    folders = str(resolve(target, "target")), str(resolve(draft, "draft"))
    cores = machine_facts.partition_cores()
    apart, beside, factor = _measured(folders, engine, cores, samples, notice)
    notice("draft on the target's device")
    shared = _on_target_device(folders, cores, samples, notice)
    target_size, draft_size = (weights_in(Path(folder), bool(cores)) for folder in folders)
    source = f"measured on {machine_facts.chip()}, {date}"
    return DeviceProfile(
        name="this-machine",
        description=f"{machine_facts.chip()}: {folders[0]} and {folders[1]} ({engine})",
        target=device_times(apart, source, target_size),
        draft=device_times(beside, source, draft_size),
        draft_on_target_device=device_times(shared, source, draft_size),
        both_busy=slowed(factor, source),
    )


def _measured(
    folders: tuple[str, str], engine: DraftEngineName, cores: Cores, samples: int, notice: OnCalibrationProgress
) -> tuple[Times, Times, float]:
    """The target and the draft, each alone on its own device, and the slow-down of both at once."""
    converts = draft_model(engine) == "package"
    draft = str(converted_draft(folders[1])) if converts else folders[1]
    notice("loading models")
    with _rig(folders[0], draft, engine, cores) as rig:
        hellos = rig.start("target"), rig.start("draft")
        alone = target_alone(rig, hellos[0], samples, notice), draft_alone(rig, hellos[1], samples, notice)
        return *alone, slow_down(rig, hellos, alone, samples, notice)


def _on_target_device(folders: tuple[str, str], cores: Cores, samples: int, notice: OnCalibrationProgress) -> Times:
    with _rig(*folders, "mlx", dict.fromkeys(cores, cores["target"])) as rig:
        return draft_alone(rig, rig.start("draft"), samples, notice)


@contextmanager
def _rig(target: str, draft: str, engine: DraftEngineName, cores: Cores) -> Iterator[Rig]:
    session = Session.create()
    setup = OrchestratorSetup(
        session=str(session.folder),
        address=session.client_address,
        target=target,
        draft=draft,
        draft_engine=engine,
        options=Options(arena_memory=0),
    )
    try:
        with Rig(setup, session, cores) as rig:
            yield rig
    finally:
        session.remove()
