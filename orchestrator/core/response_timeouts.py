"""Overdue answers of the target: when to send a message again, restart the sequence, or replace the target. Pure."""

from collections.abc import Mapping
from enum import Enum, auto

from orchestrator.core.commands import Replace
from orchestrator.core.phases import AWAITING_TARGET, Phase
from orchestrator.core.sequence import Sequence
from orchestrator.core.worker_registry import WorkerRegistry
from protocol.messages.base import SequenceId

_ANSWER_SECONDS = 5.0
"""After this long without an answer the message is sent again; the target's answers are idempotent."""
_MAX_RESENDS = 2
"""After so many resends of a tree the sequence is restarted: the target may be at another round."""
_SILENCE_SECONDS = 60.0
"""A target whose answer is overdue and that sends no message at all for this long is replaced."""


class Remedy(Enum):
    """What to do about an answer that is overdue."""

    SEND_AGAIN = auto()
    RESTART = auto()


class ResponseTimeouts:
    """Timeouts of the target's answers; none while no target is up."""

    def __init__(self, sequences: Mapping[SequenceId, Sequence], workers: WorkerRegistry) -> None:
        self._sequences = sequences
        self._workers = workers

    def deadline(self) -> float | None:
        """When the first answer is overdue."""
        return min((sequence.sent_at + _ANSWER_SECONDS for sequence in self._awaiting()), default=None)

    def overdue(self, now: float) -> list[tuple[Sequence, Remedy]]:
        """Sequences whose answer is overdue, each with the remedy. Their timeouts begin again."""
        late = [sequence for sequence in self._awaiting() if now >= sequence.sent_at + _ANSWER_SECONDS]
        return [(sequence, _remedy(sequence, now)) for sequence in late]

    def silent_target(self, now: float) -> Replace | None:
        """The command that replaces the target, if the target was silent for too long."""
        silence = self._workers.silence("target", now) if "target" in self._workers else 0.0
        if silence <= _SILENCE_SECONDS:
            return None
        return Replace(
            "target", self._workers.incarnation("target"), f"The target has been silent for {silence:.0f} s."
        )

    def _awaiting(self) -> list[Sequence]:
        if "target" not in self._workers:
            return []
        return [sequence for sequence in self._sequences.values() if sequence.phase in AWAITING_TARGET]


def _remedy(sequence: Sequence, now: float) -> Remedy:
    sequence.sent_at = now
    sequence.resends += 1
    restart = sequence.resends > _MAX_RESENDS and sequence.phase is Phase.VERIFYING
    return Remedy.RESTART if restart else Remedy.SEND_AGAIN
