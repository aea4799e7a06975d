"""Measures the processor time of the state machine's rounds behind prompts of several lengths.

`python -m orchestrator.lab.bench.costs.micro_context` writes figures as JSON.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from orchestrator.core.events import Arrived, Event
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.lab.bench.costs.figure import Figure
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.devices import Devices
from orchestrator.lab.simulate.workers import modelled_pipeline
from orchestrator.machine.profiles.device_profiles import load_profile
from protocol.messages.worker import Grow, Verdict

_DEVICE = "m4-16gb-qwen2.5-3b"
_LENGTHS = (1_024, 8_192, 32_768, 120_000)
_ROUNDS = 200
_REPEATS = 5


class Timing(NamedTuple):
    """One run of the state machine, in seconds."""

    round: float
    """The steps of a round, on average."""
    slowest: float
    """A single step while the request is decoded."""


def main() -> int:
    sys.stdout.write(msgspec.json.encode(list(figures())).decode() + "\n")
    return 0


def figures(lengths: Sequence[int] = _LENGTHS, rounds: int = _ROUNDS, repeats: int = _REPEATS) -> Iterator[Figure]:
    """Of one request a length, on a modelled device. All repeats of a length handle the same events."""
    for length in lengths:
        events = _recorded(length, rounds)
        timings = [_replayed(events, rounds) for _ in range(repeats)]
        name = f"state machine behind {length:,} tokens"
        yield Figure(f"{name}, a round", median(timing.round for timing in timings) * 1e6, "us")
        yield Figure(f"{name}, slowest step", median(timing.slowest for timing in timings) * 1e6, "us")


def _recorded(length: int, rounds: int) -> list[tuple[Event, float]]:
    """Of a request long enough for so many rounds with a draft, which first has to read the prompt."""
    language = ModelledLanguage(AcceptanceModel(accept=0.8), seed=1, prompt_tokens=length)
    simulation = modelled_pipeline(Options(), language, Devices.of(load_profile(_DEVICE)), seed=1, kept=None)
    simulation.submit(1, 4 * rounds + length // 40)
    simulation.run()
    return [(event, now) for now, event, _ in simulation.history]


def _replayed(events: Sequence[tuple[Event, float]], rounds: int) -> Timing:
    """Of the first rounds that begin with guesses of the draft's."""
    machine, steps, verdicts = Machine(Options()), list[float](), 0
    for event, now in events:
        began = time.thread_time()
        machine.step(event, now)
        spent = time.thread_time() - began
        message = event.message if isinstance(event, Arrived) else None
        if steps or isinstance(message, Grow):
            steps.append(spent)
            verdicts += isinstance(message, Verdict)
        if verdicts == rounds:
            return Timing(sum(steps) / rounds, max(steps))
    raise ValueError(f"The request had {verdicts} rounds with a draft, not {rounds}.")


if __name__ == "__main__":
    sys.exit(main())
