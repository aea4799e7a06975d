"""The drills' names, and the outcome of one: a promise, the measurement, and what broke the promise. Pure."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from orchestrator.lab.findings import Field, Findings, tabulated
from orchestrator.machine.check import Check

DrillName: TypeAlias = Literal[
    "draft-kill",
    "draft-stop",
    "draft-garbage",
    "target-kill",
    "orchestrator-kill",
    "interrupt",
    "segments",
    "soak",
    "conversations",
]

OnStep = Callable[[], None]
"""Called after every fault."""


@dataclass(frozen=True, slots=True)
class DrillOutcome:
    """A promise and its measurement. The promise held if there are no failures and no missed time limits."""

    promise: str
    measured: str
    failures: Sequence[str] = ()
    """Sentences: wrong tokens, failed requests, leftovers."""
    late: Sequence[str] = ()
    """Sentences: missed time limits. A busy machine may cause them."""
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def held(self) -> bool:
        return not self.failures and not self.late


_SENTENCES_SHOWN = 5


def check(name: str, outcome: DrillOutcome, late: Literal["warn", "fail"]) -> Check:
    """`late`: what a missed time limit is; a busy machine may miss one."""
    broken = " ".join([*outcome.failures, *outcome.late][:_SENTENCES_SHOWN])
    status = "fail" if outcome.failures else late if outcome.late else "ok"
    return Check(name, status, f"{outcome.promise}. {outcome.measured}", broken or None)


def findings(outcomes: Mapping[str, DrillOutcome], seed: int) -> Findings:
    """A row a drill."""
    load = round(os.getloadavg()[0], 1)
    fields: tuple[Field[DrillOutcome], ...] = (
        Field("promise", lambda each: each.promise),
        Field("measured", lambda each: each.measured),
        Field("held?", lambda each: "yes" if each.held else "no"),
    )
    drills = {
        name: {
            "promise": outcome.promise,
            "held": outcome.held,
            "failures": list(outcome.failures),
            "late": list(outcome.late),
            **outcome.figures,
        }
        for name, outcome in outcomes.items()
    }
    return Findings(
        title="drills",
        conditions=(f"seed {seed}, load {load} on {os.cpu_count()} processors",),
        tables=(tabulated("", fields, list(outcomes.values()), wrong=lambda each: not each.held),),
        checks=tuple(check(name, outcome, late="fail") for name, outcome in outcomes.items()),
        figures={"seed": seed, "load": load, "drills": drills},
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all values do not exceed (nearest rank); NaN without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum of times, as figures in milliseconds."""
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {f"{name}_{label}_ms": round(1000 * percentile(seconds, share), 1) for label, share in shares.items()}


def too_late(what: str, seconds: float, limit: float) -> list[str]:
    """A sentence if `seconds` exceeds `limit`."""
    return [f"{what} took {1000 * seconds:.0f} ms; the promise is {1000 * limit:.0f} ms."] if seconds > limit else []


def left_behind(where: str, remains: Iterable[str]) -> list[str]:
    """A sentence for each process, folder or segment that a pipeline left."""
    return [f"{where}: {each} was left behind." for each in remains]


def milliseconds(seconds: Sequence[float]) -> str:
    """Median, 99th percentile and maximum as text."""
    p50, p99, longest = (1000 * percentile(seconds, share) for share in (0.5, 0.99, 1.0))
    return f"{p50:.0f} / {p99:.0f} / {longest:.0f} ms"
