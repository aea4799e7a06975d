"""All drills by name, with the counts that their promises speak of."""

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.tools.drill.drills import (
    draft_garbage,
    draft_kill,
    draft_stop,
    interrupt,
    orchestrator_kill,
    segments,
    soak,
    target_kill,
)
from orchestrator.tools.drill.outcome import DrillOutcome, OnStep


@dataclass(frozen=True, slots=True)
class Drill:
    """`run(count, seed, on_step)`; it calls `on_step` so many times."""

    promise: str
    run: Callable[[int, int, OnStep], DrillOutcome]
    full: int
    """The count that is promised."""
    quick: int
    """Enough to see it work, in less than a minute."""


DRILLS: dict[str, Drill] = {
    "draft-kill": Drill(draft_kill.PROMISE, draft_kill.run, full=200, quick=9),
    "draft-stop": Drill(draft_stop.PROMISE, draft_stop.run, full=60, quick=6),
    "draft-garbage": Drill(draft_garbage.PROMISE, draft_garbage.run, full=100, quick=10),
    "target-kill": Drill(target_kill.PROMISE, target_kill.run, full=50, quick=4),
    "orchestrator-kill": Drill(orchestrator_kill.PROMISE, orchestrator_kill.run, full=100, quick=6),
    "interrupt": Drill(interrupt.PROMISE, interrupt.run, full=50, quick=9),
    "segments": Drill(segments.PROMISE, segments.run, full=1000, quick=40),
    "soak": Drill(soak.PROMISE, soak.run, full=240, quick=8),
}
