"""One pipeline for a long time, with constant requests and a fault every few seconds: no resource may grow."""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.api.client import Client
from orchestrator.api.pipeline import Pipeline
from orchestrator.tools.drill.drill_requests import DrillRequest, drill_requests, serve, wrong
from orchestrator.tools.drill.drills.soak_faults import FaultInjector
from orchestrator.tools.drill.outcome import DrillOutcome, OnStep, left_behind
from orchestrator.tools.drill.processes import Usage, mark, members, own_registry, remains, usage

PROMISE = "soak, a fault every 5 s: every answer exact; memory, descriptors and threads flat"
FAULT_SECONDS = 5.0
_CLIENTS = 2
_WATCHED = ("orchestrator", "target_worker", "draft_worker")
_QUARTER = 0.25
_GROWTH = 1.1
_GROWTH_BYTES = 16 << 20
"""Memory is flat if the last quarter's median is at most a tenth and 16 MiB above the second quarter's."""


@dataclass(slots=True)
class RequestLoop:
    """A client that sends one request after the other, on a thread of its own."""

    address: str
    requests: Sequence[DrillRequest]
    first: int
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.ended.is_set():
            request = self.requests[(self.first + self.answered) % len(self.requests)]
            self.failures += wrong(request, serve(Client(self.address), request), f"answer {self.answered}")
            self.answered += 1


def run(count: int, seed: int, on_step: OnStep) -> DrillOutcome:
    """`count` faults, one every five seconds."""
    with own_registry():
        requests = drill_requests(seed)
        with Pipeline(draft_engine="mlx") as pipeline:
            place = mark(pipeline.address)
            loops = [RequestLoop(pipeline.address, requests, first) for first in range(_CLIENTS)]
            threads = [threading.Thread(target=loop.run, daemon=True) for loop in loops]
            for thread in threads:
                thread.start()
            samples = _inject_faults(FaultInjector(pipeline.address, place, requests, seed), place, count, on_step)
            for loop in loops:
                loop.ended.set()
            for thread in threads:
                thread.join(60.0)
            failures = [text for loop in loops for text in loop.failures]
            failures += ["A client still waits for its answer." for thread in threads if thread.is_alive()]
            failures += wrong(requests[0], serve(pipeline, requests[0]), "after the last fault")
        failures += left_behind("at the end", remains(place))
    grown = [text for name in (*_WATCHED, "client") for text in _growth(name, samples)]
    answered = sum(loop.answered for loop in loops)
    measured = f"{count} faults, {answered} answers, {len(failures)} failures; {_levels(samples)}"
    figures = {"faults": count, "answers": answered, **_figures(samples)}
    return DrillOutcome(PROMISE, measured, [f"seed {seed}: {text}" for text in failures + grown], (), figures)


def _inject_faults(injector: FaultInjector, place: str, count: int, on_step: OnStep) -> list[dict[str, Usage]]:
    """Inject `count` faults; returns what every process held just before each."""
    samples: list[dict[str, Usage]] = []
    due = time.monotonic()
    for number in range(count):
        due += FAULT_SECONDS
        time.sleep(max(0.0, due - time.monotonic()))
        pids = {**members(place), "client": os.getpid()}
        samples.append({name: held for name, pid in pids.items() if (held := usage(pid)) is not None})
        injector.faults[number % len(injector.faults)]()
        on_step()
    return samples


def _quarter(name: str, samples: Sequence[dict[str, Usage]], last: bool) -> list[Usage]:
    """What a process held in the last quarter, or in the second one: the first quarter is the warm-up."""
    size = max(1, int(len(samples) * _QUARTER))
    part = samples[-size:] if last else samples[size : 2 * size]
    return [sample[name] for sample in part if name in sample]


def _growth(name: str, samples: Sequence[dict[str, Usage]]) -> list[str]:
    early, late = _quarter(name, samples, last=False), _quarter(name, samples, last=True)
    if not early or not late:
        return []
    before, after = _median([held.memory for held in early]), _median([held.memory for held in late])
    sentences: list[str] = []
    if after > _GROWTH * before + _GROWTH_BYTES:
        sentences.append(f"The memory of {name} grew from {before >> 20} to {after >> 20} MiB.")
    for what in ("descriptors", "threads"):
        first, final = ([getattr(held, what) or 0 for held in part] for part in (early, late))
        # Requests in progress hold some too, so the minimum of each quarter is compared.
        if min(final) > min(first) + 1:
            sentences.append(f"The {what} of {name} grew from {min(first)} to {min(final)}.")
    return sentences


def _figures(samples: Sequence[dict[str, Usage]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name in (*_WATCHED, "client"):
        for label, last in (("early", False), ("late", True)):
            part = _quarter(name, samples, last)
            if part:
                figures[f"{name}_{label}_mib"] = round(_median([held.memory for held in part]) / (1 << 20), 1)
                figures[f"{name}_{label}_descriptors"] = min(held.descriptors or 0 for held in part)
                figures[f"{name}_{label}_threads"] = min(held.threads or 0 for held in part)
    return figures


def _levels(samples: Sequence[dict[str, Usage]]) -> str:
    """Memory, descriptors and threads of the orchestrator in the second and in the last quarter."""
    figures = _figures(samples)
    names = ("mib", "descriptors", "threads")
    early, late = (
        " / ".join(f"{figures.get(f'orchestrator_{label}_{name}', 0):.0f}" for name in names)
        for label in ("early", "late")
    )
    return f"orchestrator MiB / descriptors / threads {early} → {late}"


def _median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2]
