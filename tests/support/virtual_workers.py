"""Real workers on the virtual clock of a simulation: their own work takes no time, their pace takes the device's."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from draft_worker.worker import DraftWorker
from orchestrator.core.events import Arrived, Event
from orchestrator.lab.simulate.modelled_worker import Work
from orchestrator.lab.simulate.simulation import Simulation
from protocol.messages.base import NodeId
from protocol.messages.worker import FromWorker, Ping, Pong, ToWorker, Verdict
from protocol.speculation.candidates import Candidates
from protocol.worker.pacing import DevicePace, Pacer
from target_worker.worker import TargetWorker

Build: TypeAlias = Callable[[Callable[[], float], Pacer], DraftWorker | TargetWorker]
"""A worker from its clock and its pacer."""


class VirtualWorker:
    """A `ModelledWorker` whose messages are handled by a real worker at a device's pace."""

    def __init__(self, build: Build, pace: DevicePace) -> None:
        self._now = 0.0
        self._worker = build(self._clock, Pacer(pace, self._clock, self._sleep))
        self.hello = self._worker.hello()

    def handle(self, message: ToWorker) -> Work:
        if isinstance(message, Ping):
            return Work((Pong(message.sent),))
        return self._timed(self._worker.handle(message))

    def work(self) -> Work | None:
        return self._timed(self._worker.work()) if self._worker.has_work else None

    def _timed(self, replies: Iterable[FromWorker]) -> Work:
        began = self._now
        return Work(tuple(replies), self._now - began)

    def _clock(self) -> float:
        return self._now

    def _sleep(self, seconds: float) -> None:
        self._now += seconds


class FixedPrompts:
    """A `Language` of prompts alone: real workers decide everything else."""

    def __init__(self, prompts: Sequence[tuple[int, ...]]) -> None:
        self._prompts = prompts

    def prompt(self, request: int) -> tuple[int, ...]:
        return self._prompts[request]

    def token(self, request: int, position: int) -> int:
        return 0

    def candidates(self, request: int, node: NodeId, position: int, on_target_path: bool, limit: int) -> Candidates:
        raise AssertionError("a real draft makes the guesses")


def rounds(simulation: Simulation) -> list[tuple[int, int, int]]:
    """The rounds in order: sequence, accepted tokens, bonus token. The simulation keeps its whole history."""
    events: Iterator[Event] = (event for _, event, _ in simulation.history)
    verdicts = [event.message for event in events if isinstance(event, Arrived) and isinstance(event.message, Verdict)]
    return [(verdict.sequence, len(verdict.path), verdict.bonus) for verdict in verdicts]
