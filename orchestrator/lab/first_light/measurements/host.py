"""What needs no comparison of models: `doctor`'s checks and the host's single steps."""

from orchestrator.lab.bench.costs import micro
from orchestrator.lab.findings import Findings, Value
from orchestrator.lab.first_light.stages import Asked
from orchestrator.runtime.doctor.doctor import examine

_OTHERS = Value(
    "KV injected into mlx-lm's cache",
    0.2,
    "ms",
    "reported",
    "M4, Qwen2.5-3B, by assignment: no shared memory, no check",
)


def checks(asked: Asked) -> Findings:
    """What `doctor` checks."""
    asked.notice("checking packages, devices, memory and network")
    return Findings(checks=tuple(examine()))


def hand_off(asked: Asked) -> Findings:
    """How long a target takes to adopt the KV of another process."""
    asked.notice("adopting KV from shared memory")
    return Findings(values=(*micro.adoption(*(("40", "2") if asked.settings.short else ())), _OTHERS))
