"""How a pipeline's processes on this machine share the GPU's memory: in proportion to their weights."""

from collections.abc import Mapping
from pathlib import Path

from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.machine.drafts.drafter_memory import drafter_bytes
from orchestrator.machine.models.checkpoints import weight_bytes
from orchestrator.runtime.setup import OrchestratorSetup
from protocol.contracts.engines import draft_model
from protocol.messages.base import Role


def gpu_shares(weights: Mapping[Role, int]) -> dict[Role, float]:
    """The share of each process, from the bytes of its weights. The shares sum to 1."""
    total = sum(weights.values())
    return {role: size / total for role, size in weights.items() if size}


def weights_on_gpu(setup: OrchestratorSetup) -> dict[Role, int]:
    """Bytes of the weights that MLX would hold for each local worker; no entry for a worker without any."""
    folders: dict[Role, str] = {}
    if setup.target_engine == "mlx" and not setup.target_texts:
        folders["target"] = setup.target
    drafts = STRATEGIES[setup.options.strategy].drafts
    trained = drafts and not setup.draft_command and draft_model(setup.draft_engine) == "drafter"
    if drafts and not setup.draft_command and draft_model(setup.draft_engine) == "checkpoint":
        folders["draft"] = setup.draft or setup.target
    elif drafts and setup.auto is not None:
        # MLX drafts if Core ML fails.
        folders["draft"] = setup.auto.checkpoint
    if setup.prefill_engine == "mlx":
        folders["prefill"] = setup.prefill or setup.target
    found: dict[Role, int] = {role: weight_bytes(Path(folder)) for role, folder in folders.items()}
    if trained:
        found["draft"] = drafter_bytes(Path(setup.draft), Path(setup.target))
    if "target" in found and setup.target_hosts is not None and not setup.target_hosts.local:
        found["target"] //= setup.target_hosts.ranks
    return found
