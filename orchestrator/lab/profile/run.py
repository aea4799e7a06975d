"""A traced run on one clock: the spans of all processes and the messages between them."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from orchestrator.runtime.recording import Seen, Traced, load_record
from protocol.errors import PipelineError
from protocol.messages.base import Role
from protocol.worker.spans import SpanKind, load_spans


class TracedSpan(NamedTuple):
    """Nanoseconds on the orchestrator's clock; the fields of `protocol.worker.spans.SPAN`."""

    kind: SpanKind
    begin: int
    end: int
    sequence: int = 0
    round: int = 0
    tokens: int = 0
    serial: int = 0

    @property
    def length(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class WorkerLife:
    """One worker process from its start to its end."""

    worker: Traced
    spans: tuple[TracedSpan, ...]
    """Oldest first."""
    lost: int = 0
    """Older ones that were overwritten."""

    @property
    def name(self) -> str:
        return f"{self.worker.role}-{self.worker.incarnation}"


@dataclass(frozen=True, slots=True)
class TracedRun:
    """The traces of all processes of one pipeline."""

    orchestrator: tuple[TracedSpan, ...]
    lives: tuple[WorkerLife, ...]
    seen: tuple[Seen, ...]
    """Messages in the order in which the orchestrator read or sent them."""
    dropped: int = 0
    """Spans of the orchestrator, and messages, that were overwritten."""

    def of(self, role: Role) -> list[TracedSpan]:
        """The spans of a role's workers, by their beginning."""
        spans = (span for life in self.lives if life.worker.role == role for span in life.spans)
        return sorted(spans, key=lambda span: span.begin)

    @property
    def lost(self) -> int:
        """Number of spans and messages that were overwritten by newer ones."""
        return self.dropped + sum(life.lost for life in self.lives)


def load(folder: Path) -> TracedRun:
    """Raises PipelineError if the orchestrator left no trace there. A worker that left none has no spans."""
    try:
        record = load_record(folder)
        spans, lost = load_spans(folder / "orchestrator.spans")
    except OSError as error:
        raise PipelineError("The pipeline ended before it could write its trace: run the profile again.") from error
    lives = tuple(load_life(folder / f"{each.role}-{each.incarnation}.spans", each) for each in record.workers)
    return TracedRun(_spans(spans), lives, tuple(sorted(record.seen, key=lambda seen: seen.at)), lost + record.lost)


def load_life(path: Path, worker: Traced) -> WorkerLife:
    """The spans in a file of this worker, or none where there is no file."""
    if not path.is_file():
        return WorkerLife(worker, ())
    spans, lost = load_spans(path)
    return WorkerLife(worker, _spans(spans), lost)


def _spans(spans: np.ndarray) -> tuple[TracedSpan, ...]:
    return tuple(
        TracedSpan(SpanKind(kind), begin, end, sequence, round, tokens, serial)
        for begin, end, sequence, round, serial, kind, tokens in spans.tolist()
    )
