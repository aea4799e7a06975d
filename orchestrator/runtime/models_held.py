"""The models that a pipeline's workers on this machine hold in MLX."""

from pathlib import Path

from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.machine.drafts.converted_draft import is_converted
from orchestrator.runtime.setup import OrchestratorSetup
from protocol.contracts.engines import draft_model
from protocol.messages.base import Role


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
        folders["prefill"] = setup.prefill or setup.target
    return {role: Path(folder) for role, folder in folders.items()}


def trained_drafter(setup: OrchestratorSetup) -> Path | None:
    """The folder of the trained drafter that drafts in MLX."""
    return Path(setup.draft) if drafts(setup) and draft_model(setup.draft_engine) == "drafter" else None


def core_ml_packages(setup: OrchestratorSetup) -> dict[Role, Path]:
    """The converted models that are loaded at the start."""
    package = setup.draft if drafts(setup) and draft_model(setup.draft_engine) == "package" else ""
    folders: dict[Role, str] = {"draft": package, "prefill": setup.prefill}
    return {role: Path(folder) for role, folder in folders.items() if folder and is_converted(Path(folder))}


def machines(setup: OrchestratorSetup) -> int:
    """Among how many machines the target is divided."""
    return 1 if setup.target_hosts is None or setup.target_hosts.local else setup.target_hosts.ranks
