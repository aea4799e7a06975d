"""Measures the processor time of telemetry: recording the state machine's steps and building frames.

`python -m orchestrator.lab.bench.costs.micro_telemetry` writes figures as JSON.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

from orchestrator.core.commands import Command
from orchestrator.core.events import Arrived, Event
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.core.telemetry.recorder import TelemetryRecorder
from orchestrator.core.telemetry.subscribers import FRAME_INTERVAL
from orchestrator.lab.bench.costs.figure import Figure
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.devices import Devices
from orchestrator.lab.simulate.workers import modelled_pipeline
from orchestrator.machine.profiles.device_profiles import load_profile
from protocol.messages.worker import Verdict
from protocol.transport.codec import Stamp, encode

_DEVICE = "m4-16gb-qwen2.5-3b"
_TOKENS = 400
_REPEATS = 7
_ROUND_LIMIT = 200.0
"""Microseconds."""
_FRAME_LIMIT = 2.0
"""Milliseconds: 4% of one core at twenty frames a second."""


def main() -> int:
    sys.stdout.write(msgspec.json.encode(list(figures())).decode() + "\n")
    return 0


def figures(tokens: int = _TOKENS, repeats: int = _REPEATS) -> Iterator[Figure]:
    """Figures of one request on a modelled device. All repeats handle the same events."""
    events = _recorded(tokens)
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
    yield Figure("state machine, a round", median(alone) / rounds * 1e6, "us")
    yield Figure("telemetry records a round", median(recording) / rounds * 1e6, "us", _ROUND_LIMIT)
    yield Figure("a telemetry frame is built and encoded", median(building) * 1e3, "ms", _FRAME_LIMIT)
    yield Figure("a telemetry frame on the wire", median(sizes) / 1024, "KiB")


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


def _recorded(tokens: int) -> list[tuple[Event, float]]:
    language = ModelledLanguage(AcceptanceModel(accept=0.8), seed=1, prompt_tokens=64)
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


if __name__ == "__main__":
    sys.exit(main())
