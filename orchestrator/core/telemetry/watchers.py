"""Who watches, and when each is told next. Pure; while nobody watches, nothing is observed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from orchestrator.core.commands import Command
from orchestrator.core.events import Event
from orchestrator.core.telemetry.recorder import TelemetryRecorder
from protocol.messages.telemetry import TelemetryFrame, Watch

W = TypeVar("W")

MOST_WATCHERS = 16
PAUSE = 0.05
"""Seconds between two scenes, whoever asks for them: painting one takes longer than a round's other duties."""
_PATIENCE = 1.0
"""Seconds after which a watcher is answered although nothing happened."""
_LINGER = 3.0
"""Seconds for which there is still something to be seen by a watcher that has not asked again."""


@dataclass(frozen=True, slots=True)
class _Question:
    watch: Watch
    at: float


class Watchers(Generic[W]):
    """Each question is answered once, so that whoever is slow to ask again misses scenes and delays nobody."""

    def __init__(self, observation: TelemetryRecorder) -> None:
        self._observation = observation
        self._questions: dict[W, _Question] = {}
        self._painted_at = 0.0
        self._until: float | None = None
        """Somebody watches, at least until then."""

    @property
    def watching(self) -> bool:
        return self._until is not None

    def ask(self, who: W, watch: Watch, now: float) -> None:
        """`who` wants a scene; a question not yet answered is replaced, and with too many the oldest is forgotten."""
        self._questions.pop(who, None)
        self._questions[who] = _Question(watch, now)
        if len(self._questions) > MOST_WATCHERS:
            del self._questions[next(iter(self._questions))]
        self._until = now + _LINGER

    def saw(self, event: Event, commands: Sequence[Command], now: float) -> None:
        """To be called only while somebody is watching."""
        self._observation.saw(event, commands, now)

    def deadline(self) -> float | None:
        """When `due` should be asked at the latest."""
        if self._until is None:
            return None
        return min([self._until, *map(self._due_at, self._questions.values())])

    def due(self, now: float) -> list[tuple[W, TelemetryFrame]]:
        """Who is to be told what now."""
        if self._until is not None and now >= self._until:
            self._until = None
            self._observation.clear()
            self._questions.clear()
        ready = [who for who, question in self._questions.items() if now >= self._due_at(question)]
        if not ready:
            return []
        self._painted_at = now
        return [(who, self._answer(self._questions.pop(who).watch, now)) for who in ready]

    def _due_at(self, question: _Question) -> float:
        news = self._observation.serial != question.watch.after
        return self._painted_at + PAUSE if news else question.at + _PATIENCE

    def _answer(self, watch: Watch, now: float) -> TelemetryFrame:
        return self._observation.scene(watch.after, watch.sequence, now)
