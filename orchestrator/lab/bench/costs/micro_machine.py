"""Measures the processor time of the state machine, behind long contexts and with telemetry.

`python -m orchestrator.lab.bench.costs.micro_machine` writes figures as JSON.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from orchestrator.core.commands import Command
from orchestrator.core.events import Arrived, Event
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.core.telemetry import FRAME_INTERVAL, TelemetryRecorder
from orchestrator.lab.findings import Value
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.devices import Devices
from orchestrator.lab.simulate.workers import modelled_pipeline
from orchestrator.machine.profiles.device_profiles import load_profile
from protocol.messages.worker import Grow, Verdict
from protocol.transport.codec import Stamp, encode

_DEVICE = "m4-16gb-qwen2.5-3b"
_TOKENS = 400
_REPEATS = 7
_ROUND_LIMIT = 200.0
"""Microseconds."""
_FRAME_LIMIT = 2.0
"""Milliseconds: 4% of one core at twenty frames a second."""
_LENGTHS = (1_024, 8_192, 32_768, 120_000)
"""Prompt tokens."""
_ROUNDS = 200


def main() -> int:
    figures = [*telemetry(), *long_contexts()]
    sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
    return 0


def telemetry(tokens: int = _TOKENS, repeats: int = _REPEATS) -> Iterator[Value]:
    """Figures of one request on a modelled device. All repeats handle the same events."""
    events = _recorded(64, tokens)
    rounds = sum(isinstance(event, Arrived) and isinstance(event.message, Verdict) for event, _ in events)
    alone: list[float] = []
    recorders: list[_TimedRecorder] = []
    for _ in range(repeats):
        machine = Machine(Options())
        recorders.append(_TimedRecorder(TelemetryRecorder(machine, str)))
        alone.append(_replayed(machine, events, recorders[-1]))
    recording = [recorder.recording for recorder in recorders]
    building = [seconds for recorder in recorders for seconds in recorder.building]
    sizes = [size for recorder in recorders for size in recorder.sizes]
    yield Value("state machine, a round", median(alone) / rounds * 1e6, "us")
    yield Value("telemetry records a round", median(recording) / rounds * 1e6, "us", limit=_ROUND_LIMIT)
    yield Value("a telemetry frame is built and encoded", median(building) * 1e3, "ms", limit=_FRAME_LIMIT)
    yield Value("a telemetry frame on the wire", median(sizes) / 1024, "KiB")


class _TimedRecorder:
    """Times a recorder, and the frames that one subscriber gets at the highest rate."""

    def __init__(self, telemetry: TelemetryRecorder) -> None:
        self.recording = 0.0
        self.building: list[float] = []
        self.sizes: list[int] = []
        self._telemetry = telemetry
        self._after = 0
        self._next = 0.0

    def record(self, event: Event, commands: Sequence[Command], now: float) -> None:
        began = time.thread_time()
        self._telemetry.record(event, commands, now)
        recorded = time.thread_time()
        self.recording += recorded - began
        if now < self._next:
            return
        frame = self._telemetry.frame(self._after, None, now)
        self.sizes.append(len(encode(frame, Stamp(0, 0))))
        self.building.append(time.thread_time() - recorded)
        self._after, self._next = frame.serial, now + FRAME_INTERVAL


def _recorded(prompt: int, tokens: int) -> list[tuple[Event, float]]:
    """The events of one request on a modelled device, whose draft first has to read the prompt."""
    language = ModelledLanguage(AcceptanceModel(accept=0.8), seed=1, prompt_tokens=prompt)
    simulation = modelled_pipeline(Options(), language, Devices.of(load_profile(_DEVICE)), seed=1, kept=None)
    simulation.submit(1, tokens)
    simulation.run()
    return [(event, now) for now, event, _ in simulation.history]


def _replayed(machine: Machine, events: Sequence[tuple[Event, float]], recorder: _TimedRecorder) -> float:
    """Seconds that the machine takes for all events, without those of the recorder."""
    spent = 0.0
    for event, now in events:
        began = time.thread_time()
        commands = machine.step(event, now)
        spent += time.thread_time() - began
        recorder.record(event, commands, now)
    return spent


class Timing(NamedTuple):
    """One run of the state machine, in seconds."""

    round: float
    """The steps of a round, on average."""
    slowest: float
    """A single step while the request is decoded."""


def long_contexts(lengths: Sequence[int] = _LENGTHS, rounds: int = _ROUNDS, repeats: int = 5) -> Iterator[Value]:
    """Of one request a length, on a modelled device. All repeats of a length handle the same events."""
    for length in lengths:
        events = _recorded(length, 4 * rounds + length // 40)
        timings = [_rounds(events, rounds) for _ in range(repeats)]
        name = f"state machine behind {length:,} tokens"
        yield Value(f"{name}, a round", median(timing.round for timing in timings) * 1e6, "us")
        yield Value(f"{name}, slowest step", median(timing.slowest for timing in timings) * 1e6, "us")


def _rounds(events: Sequence[tuple[Event, float]], rounds: int) -> Timing:
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
