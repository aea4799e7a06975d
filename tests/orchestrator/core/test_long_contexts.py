"""The orchestrator's work for a round does not grow with the context. Work is counted: calls, and bytes allocated."""

import gc
import random
import sys
import tracemalloc
from collections import defaultdict
from statistics import median
from typing import Any, NamedTuple

import pytest

from orchestrator.core.commands import Command
from orchestrator.core.events import Arrived, Event
from orchestrator.core.telemetry import TelemetryRecorder
from orchestrator.lab.simulate.worker_host import SimulatedWorker, Work
from orchestrator.lab.simulate.workers import ModelledDraft, ModelledTarget
from protocol.messages.base import Role
from protocol.messages.kv import KvOffer
from protocol.messages.worker import FromWorker, Prefilled, Verdict
from protocol.worker.pacing import DevicePace
from tests.support.scripted_simulation import DRAFT, LANGUAGE, TARGET, ScriptedSimulation, ready

CONTEXT = 1 << 16
SHORT, LONG = 1 << 10, 1 << 15
GENERATED = 64
SAVED_EVERY = 2
ARENA = "lp-00000000000000000000"
TARGET_PACE, DRAFT_PACE = (DevicePace(steps=pace.steps, prefill_rate=1e7) for pace in (TARGET, DRAFT))


class Cost(NamedTuple):
    """Of one event: calls of functions, those of C included, and the most bytes that were allocated at once."""

    calls: float
    bytes: float


class SavingTarget(ModelledTarget):
    """Offers one arena, which holds more tokens after each of some verdicts."""

    def __init__(self) -> None:
        super().__init__(LANGUAGE, TARGET_PACE, CONTEXT)
        self._verdicts = 0

    def handle(self, message: Any) -> Work:
        work = super().handle(message)
        return work._replace(replies=tuple(each for reply in work.replies for each in self._with_offer(reply)))

    def _with_offer(self, reply: FromWorker) -> tuple[FromWorker, ...]:
        if not isinstance(reply, Verdict | Prefilled):
            return (reply,)
        self._verdicts += isinstance(reply, Verdict)
        if self._verdicts % SAVED_EVERY:
            return (reply,)
        return reply, KvOffer(reply.sequence, ARENA, self.root(reply.sequence)[1], 1 << 20, 0.001)


def _build(role: Role) -> SimulatedWorker:
    return SavingTarget() if role == "target" else ModelledDraft(LANGUAGE, DRAFT_PACE, CONTEXT)


def _costs(prompt: int, strategy: str) -> dict[str, Cost]:
    """The typical cost of each kind of message, in a request with so long a prompt."""
    simulation = ready(strategy, _build)
    found: dict[str, list[Cost]] = defaultdict(list)
    source = random.Random(prompt)
    simulation.submit(1, max_tokens=GENERATED, prompt=tuple(source.randrange(1, 90) for _ in range(prompt)))
    _count_into(found, simulation)
    simulation.run()
    assert len(simulation.clients[next(iter(simulation.clients))].tokens) == GENERATED
    return {
        kind: Cost(median(cost.calls for cost in costs), median(cost.bytes for cost in costs))
        for kind, costs in found.items()
        if len(costs) >= 5
    }


def _count_into(found: dict[str, list[Cost]], simulation: ScriptedSimulation) -> None:
    step, recorder = simulation.machine.step, TelemetryRecorder(simulation.machine, str)

    def counted(event: Event, now: float) -> list[Command]:
        calls = 0

        def note(frame: Any, kind: str, argument: Any) -> None:
            nonlocal calls
            calls += kind in ("call", "c_call")

        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        sys.setprofile(note)
        commands = step(event, now)
        recorder.record(event, commands, now)
        if isinstance(event, Arrived) and isinstance(event.message, Verdict):
            recorder.frame(recorder.serial - 1, None, now)
        sys.setprofile(None)
        kind = type(event.message).__name__ if isinstance(event, Arrived) else type(event).__name__
        found[kind].append(Cost(calls, tracemalloc.get_traced_memory()[1] - before))
        return commands

    simulation.machine.step = counted


@pytest.fixture(autouse=True)
def _traced() -> Any:
    gc.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ar", "sd", "adaptive"])
def test_a_round_costs_as_much_at_32k_tokens_as_at_1k(strategy: str):
    short, long = _costs(SHORT, strategy), _costs(LONG, strategy)

    assert {"Verdict", "KvOffer"} <= set(short)
    for kind, cost in short.items():
        assert long[kind].calls <= 1.25 * cost.calls + 20, kind
        assert long[kind].bytes <= 1.25 * cost.bytes + 4096, kind
