"""Hours of the whole system on a virtual clock, one a seed, with faults and invariants. No process, no model."""

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from orchestrator.tools.drill.outcome import DrillOutcome, OnStep
from orchestrator.tools.simulate.faults.schedule import SimulatedHours, simulate_hours

_FEW = 8
"""Seeds for which it is not worth starting processes."""
_LINES = 12
"""Events shown before a violation."""


def simulate(count: int, seed: int, on_step: OnStep, hours: float = 1.0) -> DrillOutcome:
    """`count` seeds from `seed` on; one seed alone is the replay of that seed."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for outcome in _outcomes(count, seed, hours):
        counts += outcome.counts
        if outcome.violation:
            failures.append(_sentence(outcome))
        on_step()
    kept = ("requests", "finished", "cancelled", "tokens", "events", "orchestrators")
    faults = sum(counts.values()) - sum(counts[name] for name in kept)
    measured = (
        f"{count} seeds, {count * hours:g} h: {counts['requests']:,} requests, {counts['events']:,} events, "
        f"{faults:,} faults besides bad wires; {len(failures)} seeds broke a promise"
    )
    figures = {name.replace(" ", "_"): float(number) for name, number in sorted(counts.items())}
    return DrillOutcome(
        "Simulated hours: exact tokens, no deadlock, nothing forgotten or kept", measured, failures, (), figures
    )


def _outcomes(count: int, seed: int, hours: float) -> Iterator[SimulatedHours]:
    seeds = range(seed, seed + count)
    if count <= _FEW:
        yield from (simulate_hours(each, hours) for each in seeds)
        return
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(simulate_hours, hours=hours), seeds, chunksize=2)


def _sentence(outcome: SimulatedHours) -> str:
    events, seed = "\n".join(outcome.last[-_LINES:]), outcome.seed
    return f"Seed {seed}: {outcome.violation} See it again with `drill --simulate 1 --seed {seed}`.\n{events}"
