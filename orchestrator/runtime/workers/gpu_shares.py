"""How a pipeline's processes on this machine share the GPU's memory: in proportion to their weights."""

from collections.abc import Mapping
from pathlib import Path

from orchestrator.machine.memory.weights import loaded_drafter
from orchestrator.machine.models.checkpoints import weight_bytes
from orchestrator.runtime.models_held import machines, model_folders, trained_drafter
from orchestrator.runtime.setup import OrchestratorSetup
from protocol.messages.base import Role


def gpu_shares(weights: Mapping[Role, int]) -> dict[Role, float]:
    """The share of each process, from the bytes of its weights. The shares sum to 1."""
    total = sum(weights.values())
    return {role: size / total for role, size in weights.items() if size}


def weights_on_gpu(setup: OrchestratorSetup) -> dict[Role, int]:
    """Bytes of the weights that MLX would hold for each local worker; no entry for a worker without any."""
    found: dict[Role, int] = {role: weight_bytes(folder) for role, folder in model_folders(setup).items()}
    if drafter := trained_drafter(setup):
        found["draft"] = loaded_drafter(drafter, Path(setup.target), on_processor=False)
    if "target" in found:
        found["target"] //= machines(setup)
    return found
