"""The setup of an orchestrator process: its one argument, in JSON."""

import sys
from pathlib import Path

import msgspec

from orchestrator.core.options import Options
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.machine.drafts.auto_draft import AutoDraft
from orchestrator.machine.drafts.converted_draft import is_converted
from orchestrator.machine.memory.kv_plan import KvPlan
from orchestrator.machine.profiles.device_profiles import DeviceProfile
from protocol.contracts.engines import DraftEngineName, PrefillEngineName, TargetEngineName, draft_model
from protocol.contracts.target_hosts import TargetHosts
from protocol.messages.base import Role
from protocol.messages.sampling import ModelSampling


class Listening(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where remote workers connect."""

    address: str
    """tcp://HOST:PORT; port 0 picks one."""
    folder: str
    """Folder with this machine's keys and the pinned keys of other machines."""


class OrchestratorSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that an orchestrator needs. Paths are local and checked; no field comes from the network."""

    session: str
    """The session folder."""
    address: str
    """Where clients connect."""
    target: str
    draft: str
    """Model folder; empty for a draft without its own model, which gets the target's."""
    successors: str = ""
    """Folder of the table of what the target writes; empty without one."""
    target_engine: TargetEngineName = "mlx"
    draft_engine: DraftEngineName = "mlx"
    prefill_engine: PrefillEngineName = "none"
    target_texts: str = ""
    """File of recorded texts that the target replays instead of running its model; empty to run the model."""
    target_hosts: TargetHosts | None = None
    """Hosts among which the target is divided."""
    options: Options = Options()
    sampling: ModelSampling = ModelSampling()
    """The target's own values, for fields that a request leaves open."""
    kv: KvPlan | None = None
    """What KV may take in this machine's memory; None: what the options state, for each worker by itself."""
    listening: Listening | None = None
    life: int | None = None
    """A socket shared with the parent; its end of file means that the parent is gone."""
    draft_command: tuple[str, ...] = ()
    """Command to run instead of our draft worker: for a user's own drafting algorithm."""
    record: str = ""
    """Write every event of the state machine to this file."""
    pace: DeviceProfile | None = None
    """Pace the workers to this device profile."""
    auto: AutoDraft | None = None
    """The engine of the draft is chosen while the pipeline runs; `draft_engine` is the one that it begins with."""
    trace: str = ""
    """Folder to which every process writes its spans at its end; empty records none."""

    def __post_init__(self) -> None:
        """Raises InputError for an unknown draft engine."""
        draft_model(self.draft_engine)

    @property
    def second_draft(self) -> tuple[DraftEngineName, str]:
        """Engine and model folder of the draft that is not begun with, if the engine is chosen while it runs."""
        assert self.auto is not None
        auto = self.auto
        return ("mlx", auto.checkpoint) if self.draft_engine == "coreml" else ("coreml", str(auto.package))

    @classmethod
    def from_arguments(cls) -> "OrchestratorSetup":
        return msgspec.json.decode(sys.argv[1], type=cls)


# What its workers on this machine hold in MLX -----------------------------------------------------


def drafts(setup: OrchestratorSetup) -> bool:
    """Whether the pipeline starts a draft of ours."""
    return STRATEGIES[setup.options.strategy].drafts and not setup.draft_command


def model_folders(setup: OrchestratorSetup) -> dict[Role, Path]:
    """The language model of each worker; no entry for a worker without one."""
    folders: dict[Role, str] = {}
    if setup.target_engine == "mlx" and not setup.target_texts:
        folders["target"] = setup.target
    if drafts(setup) and draft_model(setup.draft_engine) == "checkpoint":
        folders["draft"] = setup.draft or setup.target
    elif STRATEGIES[setup.options.strategy].drafts and setup.auto is not None:
        # MLX drafts if Core ML fails.
        folders["draft"] = setup.auto.checkpoint
    if setup.prefill_engine == "mlx":
        folders["prefill"] = setup.target
    return {role: Path(folder) for role, folder in folders.items()}


def trained_drafter(setup: OrchestratorSetup) -> Path | None:
    """The folder of the trained drafter that drafts."""
    return Path(setup.draft) if drafts(setup) and draft_model(setup.draft_engine) == "drafter" else None


def core_ml_package(setup: OrchestratorSetup) -> Path | None:
    """The converted draft that is loaded at the start."""
    package = Path(setup.draft)
    drafted = drafts(setup) and draft_model(setup.draft_engine) == "package"
    return package if drafted and setup.draft and is_converted(package) else None


def machines(setup: OrchestratorSetup) -> int:
    """Among how many machines the target is divided."""
    return 1 if setup.target_hosts is None or setup.target_hosts.local else setup.target_hosts.ranks
