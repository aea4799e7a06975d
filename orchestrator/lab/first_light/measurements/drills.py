"""Kills on purpose, and whether the promises are kept. Always with the demo pair: the promises are the pipeline's."""

import os

from orchestrator.lab.drill.outcome import DrillName, check
from orchestrator.lab.drill.registry import DRILLS, drill_counts
from orchestrator.lab.findings import Check, Findings
from orchestrator.lab.first_light.asked import Asked
from orchestrator.machine.downloads.default_target import VARIABLE

_SEED = 1
_SHORT: tuple[DrillName, ...] = ("segments",)
_FULL: tuple[DrillName, ...] = (
    *("draft-kill", "target-kill", "draft-stop", "draft-garbage", "orchestrator-kill", "interrupt", "segments"),
)


def measure(asked: Asked) -> Findings:
    os.environ[VARIABLE] = "demo"
    counts = drill_counts(_SHORT if asked.settings.short else _FULL, 2 if asked.settings.short else None)
    checks: list[Check] = []
    for name, count in counts.items():
        asked.notice(f"{name}, {count} times")
        outcome = DRILLS[name].run(count, _SEED, lambda: None)
        checks.append(check(name, outcome, late="warn"))
    return Findings(checks=tuple(checks))
