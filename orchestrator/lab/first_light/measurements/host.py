"""What needs no comparison of models: `doctor`'s checks and the host's single steps."""

import msgspec

from orchestrator.lab.findings import Findings, Value
from orchestrator.lab.first_light.stages import Asked
from orchestrator.machine.hardware import worker_environment
from orchestrator.runtime.doctor.doctor import examine
from protocol.child_process import reports


class AdoptionOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last argument of `adoption`, in JSON."""

    tokens: tuple[int, ...] = (40, 512, 4096)
    repeats: int = 9


_GRACE = 10.0
"""Seconds from the program's figures to its end."""
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
    """How long a target takes to adopt the KV of another process, on one core."""
    asked.notice("adopting KV from shared memory")
    order = AdoptionOrder(tokens=(40,), repeats=2) if asked.settings.short else AdoptionOrder()
    one_core = worker_environment("draft", (0,))
    program, name = "orchestrator.lab.first_light.adoption", "The adoption of KV"
    (values,) = reports(program, order, list[Value], name=name, grace=_GRACE, variables=one_core)
    return Findings(values=(*values, _OTHERS))
