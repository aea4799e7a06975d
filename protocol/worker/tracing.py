"""A worker that is watched: the spans of what it does, and the order in which it does it.

Knows which replies mean which kind of work; knows no model. Watching from outside costs a worker that is
not watched nothing, and works for drafts of the user's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import msgspec

from protocol.messages.base import SequenceId
from protocol.messages.worker import Forest, Grow, Hello, KvOffer, Prefilled, Start, Stop, ToWorker, Verdict, Verify
from protocol.worker.interface import Worker, WorkerReply
from protocol.worker.spans import SpanKind, SpanRing

Script: TypeAlias = list[ToWorker | None]
"""What a worker did, in order: a message that it handled, or None for one unit of work."""

MOST_STEPS = 1 << 18
"""Longest script that is kept."""


@contextmanager
def traced(worker: Worker, folder: str, name: str) -> Iterator[Worker]:
    """`worker`, watched if there is a `folder` for what is seen; it is written at the end, however that comes."""
    if not folder:
        yield worker
        return
    watched = TracedWorker(worker, SpanRing())
    try:
        yield watched
    finally:
        watched.save(Path(folder), name)


class TracedWorker:
    """Does what `worker` does, and remembers it."""

    def __init__(self, worker: Worker, ring: SpanRing) -> None:
        self._worker = worker
        self._ring = ring
        self._grows = 0
        self._unread: set[SequenceId] = set()
        """Sequences that have not been told to be prefilled; a draft never tells."""
        self.script: Script = []

    def hello(self) -> Hello:
        return self._worker.hello()

    @property
    def has_work(self) -> bool:
        return self._worker.has_work

    def handle(self, message: ToWorker) -> Iterator[WorkerReply]:
        self._remember(message)
        if isinstance(message, Start):
            self._unread.add(message.sequence)
        elif isinstance(message, Stop):
            self._unread.discard(message.sequence)
        began = self._ring.now()
        answer: WorkerReply | None = None
        asked = _tokens_to_verify(message)
        for answer in self._worker.handle(message):
            self._answered(answer, began, asked)
            yield answer
            # What else one forward answers took no time of its own.
            began, asked = self._ring.now(), 0
        self._tidied(answer, began)

    def work(self) -> Iterator[WorkerReply]:
        self._remember(None)
        began = self._ring.now()
        answer: WorkerReply | None = None
        for answer in self._worker.work():
            self._answered(answer, began)
            yield answer
            began = self._ring.now()
        if answer is None:
            self._ring.add(SpanKind.PREFILL if self._unread else SpanKind.TIDY, began, self._ring.now())
        self._tidied(answer, began)

    def save(self, folder: Path, name: str) -> None:
        """Write the spans, and the script unless it became too long to be whole."""
        self._ring.save(folder / f"{name}.spans")
        if len(self.script) < MOST_STEPS:
            (folder / f"{name}.script").write_bytes(msgspec.json.encode(self.script))

    def _answered(self, answer: WorkerReply, began: int, asked: int = 0) -> None:
        """Record the work that ended in this answer; `asked` tokens were to be verified."""
        end = self._ring.now()
        match answer:
            case Verdict():
                self._ring.add(SpanKind.VERIFY, began, end, answer.sequence, answer.round, asked)
            case Prefilled():
                self._unread.discard(answer.sequence)
                self._ring.add(SpanKind.PREFILL, began, end, answer.sequence, answer.round, answer.tokens)
            case KvOffer():
                self._ring.add(SpanKind.TIDY, began, end)
            case Grow():
                self._grows += 1
                if answer.evaluated:
                    self._ring.add(
                        SpanKind.GROW, began, end, answer.sequence, answer.round, answer.evaluated, self._grows
                    )

    def _tidied(self, answer: WorkerReply | None, began: int) -> None:
        """Record the work that came after it."""
        if isinstance(answer, Verdict | Prefilled):
            self._ring.add(SpanKind.TIDY, began, self._ring.now(), answer.sequence, answer.round)

    def _remember(self, step: ToWorker | None) -> None:
        if len(self.script) < MOST_STEPS:
            self.script.append(step)


def _tokens_to_verify(message: ToWorker) -> int:
    match message:
        case Verify(tokens=tokens):
            return len(tokens)
        case Forest(trees):
            return sum(len(verify.tokens) for verify in trees)
        case _:
            return 0


def load_script(path: Path) -> Script:
    """Raises msgspec.ValidationError for anything that is no script."""
    return msgspec.json.decode(path.read_bytes(), type=Script)
