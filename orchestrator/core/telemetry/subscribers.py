"""Which subscribers have asked for a telemetry frame, and when each gets it. Pure; without one nothing is recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from orchestrator.core.commands import Command
from orchestrator.core.events import Event
from orchestrator.core.telemetry.recorder import TelemetryRecorder
from protocol.messages.telemetry import TelemetryFrame, Watch

Subscriber = TypeVar("Subscriber")

MAX_SUBSCRIBERS = 16
FRAME_INTERVAL = 0.05
"""Seconds between two frames, to whichever subscriber: building one takes longer than a round's other work."""
_IDLE_INTERVAL = 1.0
"""Seconds after which a subscriber gets a frame although nothing happened."""
_LINGER = 3.0
"""Seconds after the last Watch for which events are still recorded."""


@dataclass(frozen=True, slots=True)
class _Pending:
    watch: Watch
    at: float


class Subscribers(Generic[Subscriber]):
    """Each Watch is answered once: a subscriber that is slow to ask again misses frames and delays no other."""

    def __init__(self, recorder: TelemetryRecorder) -> None:
        self._recorder = recorder
        self._pending: dict[Subscriber, _Pending] = {}
        self._last_frame_at = 0.0
        self._record_until: float | None = None
        """None while there is no subscriber."""

    @property
    def active(self) -> bool:
        """Whether events have to be recorded."""
        return self._record_until is not None

    def ask(self, subscriber: Subscriber, watch: Watch, now: float) -> None:
        """Replace the subscriber's pending Watch. Beyond MAX_SUBSCRIBERS the oldest pending Watch is dropped."""
        self._pending.pop(subscriber, None)
        self._pending[subscriber] = _Pending(watch, now)
        if len(self._pending) > MAX_SUBSCRIBERS:
            del self._pending[next(iter(self._pending))]
        self._record_until = now + _LINGER

    def record(self, event: Event, commands: Sequence[Command], now: float) -> None:
        """Record a step of the state machine; to be called only while `active`."""
        self._recorder.record(event, commands, now)

    def deadline(self) -> float | None:
        """When `due` must be called at the latest."""
        if self._record_until is None:
            return None
        return min([self._record_until, *map(self._due_at, self._pending.values())])

    def due(self, now: float) -> list[tuple[Subscriber, TelemetryFrame]]:
        """The frames to send now. Forgets everything when the last Watch is too long ago."""
        if self._record_until is not None and now >= self._record_until:
            self._record_until = None
            self._recorder.clear()
            self._pending.clear()
        ready = [subscriber for subscriber, pending in self._pending.items() if now >= self._due_at(pending)]
        if not ready:
            return []
        self._last_frame_at = now
        watches = [(subscriber, self._pending.pop(subscriber).watch) for subscriber in ready]
        return [(subscriber, self._recorder.frame(watch.after, watch.sequence, now)) for subscriber, watch in watches]

    def _due_at(self, pending: _Pending) -> float:
        changed = self._recorder.serial != pending.watch.after
        return self._last_frame_at + FRAME_INTERVAL if changed else pending.at + _IDLE_INTERVAL
