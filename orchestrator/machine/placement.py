"""Where draft and target compute on this machine: apart, at the same time, or on one device, in turns. Starts nothing.

On one device, work of the draft during a forward slows the target down, so they take turns. Two devices work at once.
"""

from orchestrator.core.options import Options
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.machine import hardware
from protocol.messages.base import Role

_FEW_CORES = 3
"""Up to so many cores are shared: a core of its own for the draft would be a third of the machine or more."""


def shared_device(options: Options, own_device: bool, paced: bool = False) -> bool:
    """Whether the draft begins on the target's device. `own_device`: the draft computes on another one than MLX.
    `paced`: both have the times of a profile, whose devices are apart.

    A strategy that never drafts beside the target shares, and the published `ssd` needs both at the same time.
    """
    if options.strategy == "adaptive":
        if options.placement != "auto":
            return options.placement == "shared"
        if paced:
            return False
        if hardware.computes_on_processor():
            return len(hardware.usable_cores()) <= _FEW_CORES
        return not own_device
    return not STRATEGIES[options.strategy].caches


def usual_cores() -> dict[Role, tuple[int, ...]]:
    """`worker_cores` of a pipeline with default options, as it begins."""
    return worker_cores(shared_device(Options(), own_device=False))


def worker_cores(shared_device: bool) -> dict[Role, tuple[int, ...]]:
    """Processor cores for each worker where both compute on the processor; empty on macOS or with a GPU."""
    if not shared_device:
        return hardware.partition_cores()
    cores = hardware.usable_cores() if hardware.computes_on_processor() else ()
    return {"target": cores, "draft": cores} if cores else {}
