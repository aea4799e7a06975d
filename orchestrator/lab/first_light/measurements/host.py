"""What needs no comparison of models: `doctor`'s checks, the host's single steps, and kills on purpose."""

import os

from orchestrator.lab.bench.costs import micro
from orchestrator.lab.drill.outcome import DrillName, check
from orchestrator.lab.drill.registry import DRILLS, drill_counts
from orchestrator.lab.findings import Findings, Value
from orchestrator.lab.first_light.stages import Asked
from orchestrator.machine.check import Check
from orchestrator.machine.downloads.default_target import VARIABLE
from orchestrator.runtime.doctor.doctor import examine

_OTHERS = Value(
    "KV injected into mlx-lm's cache",
    0.2,
    "ms",
    "reported",
    "M4, Qwen2.5-3B, by assignment: no shared memory, no check",
)
_SEED = 1
_SHORT: tuple[DrillName, ...] = ("segments",)
_FULL: tuple[DrillName, ...] = (
    *("draft-kill", "target-kill", "draft-stop", "draft-garbage", "orchestrator-kill", "interrupt", "segments"),
)


def checks(asked: Asked) -> Findings:
    """What `doctor` checks."""
    asked.notice("checking packages, devices, memory and network")
    return Findings(checks=tuple(examine()))


def hand_off(asked: Asked) -> Findings:
    """How long a target takes to adopt the KV of another process."""
    asked.notice("adopting KV from shared memory")
    return Findings(values=(*micro.adoption(*(("40", "2") if asked.settings.short else ())), _OTHERS))


def drills(asked: Asked) -> Findings:
    """Whether the promises are kept. Always with the demo pair: the promises are the pipeline's."""
    os.environ[VARIABLE] = "demo"
    counts = drill_counts(_SHORT if asked.settings.short else _FULL, 2 if asked.settings.short else None)
    found: list[Check] = []
    for name, count in counts.items():
        asked.notice(f"{name}, {count} times")
        outcome = DRILLS[name].run(count, _SEED, lambda: None)
        found.append(check(name, outcome, late="warn"))
    return Findings(checks=tuple(found))
