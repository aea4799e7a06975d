"""Answers that the target owes, and when it is to be asked again, told anew or replaced. Pure."""

from collections.abc import Mapping
from enum import Enum, auto

from orchestrator.core.commands import Replace
from orchestrator.core.sequence import Phase, Sequence
from orchestrator.core.worker_registry import WorkerRegistry
from protocol.messages.base import SequenceId

_ANSWER_SECONDS = 5.0
"""After this long without an answer the target is asked again; its answers are idempotent."""
_MOST_REPEATS = 2
"""Then the target is told to start the sequence anew: it may hold an answer that fits no question."""
_SILENCE_SECONDS = 60.0
"""After this long without any sign of a target that owes an answer, it is replaced."""

AWAITING_ANSWER = (Phase.PREFILLING, Phase.VERIFYING)
"""The target has been asked and has not answered."""


class Remedy(Enum):
    """What to do about an answer that has not come."""

    ASK_AGAIN = auto()
    START_ANEW = auto()


class ResponseTimeouts:
    """Of the target that is up, if one is."""

    def __init__(self, sequences: Mapping[SequenceId, Sequence], workers: WorkerRegistry) -> None:
        self._sequences = sequences
        self._workers = workers

    def deadline(self) -> float | None:
        """When the first answer is overdue."""
        return min((sequence.asked_at + _ANSWER_SECONDS for sequence in self._owed()), default=None)

    def overdue(self, now: float) -> list[tuple[Sequence, Remedy]]:
        """Whose answers are, and what to do; from now on they are waited for once more."""
        late = [sequence for sequence in self._owed() if now >= sequence.asked_at + _ANSWER_SECONDS]
        return [(sequence, _remedy(sequence, now)) for sequence in late]

    def silent(self, now: float) -> Replace | None:
        """The target's replacement, if it owes answers and is silent for too long."""
        silence = self._workers.silence("target", now) if "target" in self._workers else 0.0
        if silence <= _SILENCE_SECONDS:
            return None
        return Replace(
            "target", self._workers.incarnation("target"), f"The target has been silent for {silence:.0f} s."
        )

    def _owed(self) -> list[Sequence]:
        if "target" not in self._workers:
            return []
        return [sequence for sequence in self._sequences.values() if sequence.phase in AWAITING_ANSWER]


def _remedy(sequence: Sequence, now: float) -> Remedy:
    sequence.asked_at = now
    sequence.repeats += 1
    hopeless = sequence.repeats > _MOST_REPEATS and sequence.phase is Phase.VERIFYING
    return Remedy.START_ANEW if hopeless else Remedy.ASK_AGAIN
