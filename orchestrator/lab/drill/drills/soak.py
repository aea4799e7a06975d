"""One pipeline for a long time, with constant requests and a fault every few seconds: no resource may grow."""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.api.client import Client
from orchestrator.api.pipeline import Pipeline
from orchestrator.lab.drill.drill_requests import DrillRequest, drill_requests, serve, wrong
from orchestrator.lab.drill.drills.soak_faults import FaultInjector
from orchestrator.lab.drill.held import figures, growth, levels
from orchestrator.lab.drill.outcome import DrillOutcome, OnStep, left_behind
from orchestrator.lab.drill.processes import Usage, mark, members, own_registry, remains, usage

PROMISE = "soak, a fault every 5 s: every answer exact; memory, descriptors and threads flat"
FAULT_SECONDS = 5.0
_CLIENTS = 2
_WATCHED = ("orchestrator", "target_worker", "draft_worker", "client")


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
    answered = sum(loop.answered for loop in loops)
    measured = f"{count} faults, {answered} answers, {len(failures)} failures; {levels('orchestrator', samples)}"
    measures = {"faults": count, "answers": answered, **figures(_WATCHED, samples)}
    return DrillOutcome(
        PROMISE, measured, [f"seed {seed}: {text}" for text in failures + growth(_WATCHED, samples)], (), measures
    )


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
