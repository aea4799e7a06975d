"""All drills by name, with the counts of their promises."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from orchestrator.lab.drill.drills import commands, conversations, segments, soak, workers
from orchestrator.lab.drill.outcome import DrillName, DrillOutcome, OnStep


@dataclass(frozen=True, slots=True)
class Drill:
    """`run(count, seed, on_step)` produces `count` faults and calls `on_step` after each."""

    promise: str
    run: Callable[[int, int, OnStep], DrillOutcome]
    full: int
    """The count that the promise is stated for."""
    quick: int
    """A count that takes less than a minute."""


DRILLS: dict[DrillName, Drill] = {
    "draft-kill": Drill(workers.KILL_PROMISE, workers.kill_draft, full=200, quick=9),
    "draft-stop": Drill(workers.STOP_PROMISE, workers.stop_draft, full=60, quick=6),
    "draft-garbage": Drill(workers.GARBAGE_PROMISE, workers.send_garbage, full=100, quick=10),
    "target-kill": Drill(workers.TARGET_PROMISE, workers.kill_target, full=50, quick=4),
    "orchestrator-kill": Drill(commands.KILL_PROMISE, commands.kill_orchestrator, full=100, quick=6),
    "interrupt": Drill(commands.INTERRUPT_PROMISE, commands.interrupt, full=50, quick=9),
    "segments": Drill(segments.PROMISE, segments.run, full=1000, quick=40),
    "soak": Drill(soak.PROMISE, soak.run, full=240, quick=8),
    "conversations": Drill(conversations.PROMISE, conversations.run, full=240, quick=8),
}
_SECONDS: dict[DrillName, float] = {"soak": soak.FAULT_SECONDS, "conversations": conversations.SAMPLE_SECONDS}
"""Of the drills that take a time: how long one of their count takes."""


def drill_counts(
    names: Iterable[DrillName], count: int | None = None, full: bool = False, minutes: float | None = None
) -> dict[DrillName, int]:
    """The count of each chosen drill; no names: of all drills."""
    chosen = list(names) or list(DRILLS)
    counts: dict[DrillName, int] = {
        name: count or (DRILLS[name].full if full else DRILLS[name].quick) for name in chosen
    }
    if minutes is not None:
        counts |= {name: max(1, round(60 * minutes / _SECONDS[name])) for name in counts if name in _SECONDS}
    return counts
