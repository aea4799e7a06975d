"""All drills: those with real processes by name, with the counts of their promises, and simulated hours."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from orchestrator.lab.drill.drills import (
    conversations,
    draft,
    interrupt,
    orchestrator_kill,
    segments,
    soak,
    target_kill,
)
from orchestrator.lab.drill.outcome import DrillName, DrillOutcome, OnStep
from orchestrator.lab.simulate.faults.simulation import SimulatedHours, simulate_hours

_SERIAL_SEEDS = 8
"""Up to this number of seeds, starting processes costs more than it saves."""
_SHOWN_EVENTS = 12
"""Events shown before a violation."""


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
    "draft-kill": Drill(draft.KILL_PROMISE, draft.kill, full=200, quick=9),
    "draft-stop": Drill(draft.STOP_PROMISE, draft.stop, full=60, quick=6),
    "draft-garbage": Drill(draft.GARBAGE_PROMISE, draft.send_garbage, full=100, quick=10),
    "target-kill": Drill(target_kill.PROMISE, target_kill.run, full=50, quick=4),
    "orchestrator-kill": Drill(orchestrator_kill.PROMISE, orchestrator_kill.run, full=100, quick=6),
    "interrupt": Drill(interrupt.PROMISE, interrupt.run, full=50, quick=9),
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


def simulate(count: int, seed: int, on_step: OnStep, hours: float = 1.0) -> DrillOutcome:
    """Simulated hours of `count` seeds from `seed` on. A count of one replays that seed."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for outcome in _simulated(count, seed, hours):
        counts += outcome.counts
        if outcome.violation:
            failures.append(_sentence(outcome))
        on_step()
    without_faults = ("requests", "finished", "cancelled", "tokens", "events", "orchestrators")
    faults = sum(counts.values()) - sum(counts[name] for name in without_faults)
    measured = (
        f"{count} seeds, {count * hours:g} h: {counts['requests']:,} requests, {counts['events']:,} events, "
        f"{faults:,} faults besides bad wires; {len(failures)} seeds broke a promise"
    )
    figures = {name.replace(" ", "_"): float(number) for name, number in sorted(counts.items())}
    promise = "Simulated hours: exact tokens, no deadlock, nothing forgotten or kept"
    return DrillOutcome(promise, measured, failures, (), figures)


def _simulated(count: int, seed: int, hours: float) -> Iterator[SimulatedHours]:
    seeds = range(seed, seed + count)
    if count <= _SERIAL_SEEDS:
        yield from (simulate_hours(each, hours) for each in seeds)
        return
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(simulate_hours, hours=hours), seeds, chunksize=2)


def _sentence(outcome: SimulatedHours) -> str:
    events, seed = "\n".join(outcome.last[-_SHOWN_EVENTS:]), outcome.seed
    return f"Seed {seed}: {outcome.violation} Replay it with `drill --simulate 1 --seed {seed}`.\n{events}"
