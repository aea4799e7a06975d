"""What it costs to be watched: noting what the state machine does, and painting scenes of it."""

import time
from collections.abc import Iterator, Sequence
from statistics import median

from orchestrator.core.commands import Command
from orchestrator.core.events import Arrived, Event
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.core.telemetry.recorder import TelemetryRecorder
from orchestrator.core.telemetry.subscribers import FRAME_INTERVAL
from orchestrator.machine.device_profiles import load_profile
from orchestrator.tools.simulate.acceptance import AcceptanceModel, InventedLanguage
from orchestrator.tools.simulate.devices import Devices
from orchestrator.tools.simulate.simulation import modelled_pipeline
from protocol.contracts.figure import Figure
from protocol.messages.worker import Verdict
from protocol.transport.codec import Stamp, encode

_DEVICE = "m4-16gb-qwen2.5-3b"
_TOKENS = 400
_REPEATS = 7
_MOST_A_ROUND = 200.0
"""Microseconds."""
_MOST_A_SCENE = 2.0
"""Milliseconds: with twenty a second, a twenty-fifth of one core."""


def figures(tokens: int = _TOKENS, repeats: int = _REPEATS) -> Iterator[Figure]:
    """Of one request on a modelled device, in processor time; each run handles exactly the same events."""
    events = _recorded(tokens)
    rounds = sum(isinstance(event, Arrived) and isinstance(event.message, Verdict) for event, _ in events)
    alone: list[float] = []
    galleries: list[_Gallery] = []
    for _ in range(repeats):
        machine = Machine(Options())
        galleries.append(_Gallery(TelemetryRecorder(machine, str)))
        alone.append(_replayed(machine, events, galleries[-1]))
    noting = [gallery.noting for gallery in galleries]
    painting = [seconds for gallery in galleries for seconds in gallery.painting]
    sizes = [size for gallery in galleries for size in gallery.sizes]
    yield Figure("state machine, a round", median(alone) / rounds * 1e6, "us")
    yield Figure("what it does is noted for a watcher, a round", median(noting) / rounds * 1e6, "us", _MOST_A_ROUND)
    yield Figure("a scene is painted and encoded", median(painting) * 1e3, "ms", _MOST_A_SCENE)
    yield Figure("a scene on the wire", median(sizes) / 1024, "KiB")


class _Gallery:
    """Notes everything, and has a scene painted as often as a watcher may have one."""

    def __init__(self, observation: TelemetryRecorder) -> None:
        self.noting = 0.0
        self.painting: list[float] = []
        self.sizes: list[int] = []
        self._observation = observation
        self._told = 0
        self._next = 0.0

    def saw(self, event: Event, commands: Sequence[Command], now: float) -> None:
        began = time.thread_time()
        self._observation.record(event, commands, now)
        noted = time.thread_time()
        self.noting += noted - began
        if now < self._next:
            return
        scene = self._observation.frame(self._told, None, now)
        self.sizes.append(len(encode(scene, Stamp(0, 0))))
        self.painting.append(time.thread_time() - noted)
        self._told, self._next = scene.serial, now + FRAME_INTERVAL


def _recorded(tokens: int) -> list[tuple[Event, float]]:
    language = InventedLanguage(AcceptanceModel(accept=0.8), seed=1, prompt_tokens=64)
    simulation = modelled_pipeline(Options(), language, Devices.of(load_profile(_DEVICE)), seed=1, kept=None)
    simulation.submit(1, tokens)
    simulation.run()
    return [(event, now) for now, event, _ in simulation.history]


def _replayed(machine: Machine, events: Sequence[tuple[Event, float]], gallery: _Gallery) -> float:
    """Seconds that the machine takes for all events, without those of the gallery."""
    spent = 0.0
    for event, now in events:
        began = time.thread_time()
        commands = machine.step(event, now)
        spent += time.thread_time() - began
        gallery.saw(event, commands, now)
    return spent
