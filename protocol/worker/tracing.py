"""Traces a worker: the spans of its work, and the order of its messages and units of work. Replays it alone: the same
messages and units of work in the same order.

Knows which reply ends which kind of work; knows no model. It wraps the worker, so that an untraced worker pays nothing
and a user's own draft can be traced, too.
"""

import gc
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import msgspec

from protocol.messages.base import RequestId
from protocol.messages.features import FeatureShipment
from protocol.messages.kv import KvOffer
from protocol.messages.worker import Forest, Grow, Hello, Prefilled, Start, Stop, ToWorker, Verdict, Verify
from protocol.security.private_files import open_private
from protocol.worker.interface import Worker, WorkerReply
from protocol.worker.spans import SpanKind, SpanRing

Script: TypeAlias = list[ToWorker | None]
"""A worker's steps in order: a message that it handled, or None for one unit of work."""

MAX_STEPS = 1 << 18
"""Length of the longest script."""


@contextmanager
def traced(worker: Worker, folder: str, name: str) -> Generator[Worker]:
    """`worker`, traced if `folder` is not empty; the trace is written at the end, also after an exception."""
    if not folder:
        yield worker
        return
    tracer = TracedWorker(worker, SpanRing())
    try:
        yield tracer
    finally:
        tracer.save(Path(folder), name)


class TracedWorker:
    """Behaves as `worker`, and records its work."""

    def __init__(self, worker: Worker, ring: SpanRing) -> None:
        self._worker = worker
        self._ring = ring
        self._grows = 0
        self._prefilling: set[RequestId] = set()
        """Sequences without a Prefilled; a draft never sends one."""
        self._silent: tuple[int, int] | None = None
        """Begin and end of the last unit of work, if it gave no reply: the next Verdict shows what it was."""
        self.script: Script = []

    def hello(self) -> Hello:
        return self._worker.hello()

    @property
    def has_work(self) -> bool:
        return self._worker.has_work

    def handle(self, message: ToWorker | FeatureShipment) -> Iterator[WorkerReply]:
        if isinstance(message, tuple):
            # A replay has no features: neither a ring nor these bytes.
            yield from self._worker.handle(message)  # pyright: ignore[reportArgumentType]
            return
        self._record_step(message)
        if isinstance(message, Start):
            self._prefilling.add(message.request)
        elif isinstance(message, Stop):
            self._prefilling.discard(message.request)
        began = self._ring.now()
        reply: WorkerReply | None = None
        width = _tokens_to_verify(message)
        for reply in self._worker.handle(message):
            self._record(reply, began, width)
            yield reply
            # Further replies of the same forward took no time of their own.
            began, width = self._ring.now(), 0
        self._record_rest(reply, began)

    def work(self) -> Iterator[WorkerReply]:
        self._record_step(None)
        began = self._ring.now()
        reply: WorkerReply | None = None
        for reply in self._worker.work():
            self._record(reply, began)
            yield reply
            began = self._ring.now()
        if reply is None and self._prefilling:
            self._ring.add(SpanKind.PREFILL, began, self._ring.now())
        elif reply is None:
            self._record_silent()
            self._silent = began, self._ring.now()
        self._record_rest(reply, began)

    def save(self, folder: Path, name: str) -> None:
        """Write the spans, and the script unless it is incomplete because of its length."""
        self._record_silent()
        self._ring.save(folder / f"{name}.spans")
        if len(self.script) < MAX_STEPS:
            with open_private(folder / f"{name}.script") as file:
                file.write(msgspec.json.encode(self.script))

    def _record(self, reply: WorkerReply, began: int, width: int = 0) -> None:
        """Record the work that ended with this reply; `width` tokens were verified."""
        end = self._ring.now()
        if isinstance(reply, Verdict) and self._silent is not None and reply.seconds * 1e9 > end - began:
            # The forward began before its Verify arrived, as the last unit of work.
            began, self._silent = self._silent[0], None
        self._record_silent()
        match reply:
            case Verdict():
                self._ring.add(SpanKind.VERIFY, began, end, reply.request, reply.round, width)
            case Prefilled():
                self._prefilling.discard(reply.request)
                self._ring.add(SpanKind.PREFILL, began, end, reply.request, reply.round, reply.tokens)
            case KvOffer():
                self._ring.add(SpanKind.TIDY, began, end)
            case Grow():
                self._grows += 1
                if reply.evaluated:
                    self._ring.add(SpanKind.GROW, began, end, reply.request, reply.round, reply.evaluated, self._grows)
            case _:
                pass

    def _record_rest(self, reply: WorkerReply | None, began: int) -> None:
        """Record the work after the last reply."""
        if isinstance(reply, Verdict | Prefilled):
            self._ring.add(SpanKind.TIDY, began, self._ring.now(), reply.request, reply.round)

    def _record_silent(self) -> None:
        """Record the last unit of work that gave no reply, unless it was the begin of a forward."""
        if self._silent is not None:
            self._ring.add(SpanKind.TIDY, *self._silent)
            self._silent = None

    def _record_step(self, step: ToWorker | None) -> None:
        if len(self.script) < MAX_STEPS:
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
    """The script in a file. Raises msgspec.ValidationError for other content."""
    return msgspec.json.decode(path.read_bytes(), type=Script)


def replay(build: Callable[[], Worker], script: Path, folder: Path) -> None:
    """Run a script and save the spans under its name in `folder`; the n-th span is that of the traced run's n-th."""
    with traced(build(), str(folder), script.stem) as worker:
        settle()
        run_script(worker, load_script(script))


def settle() -> None:
    """Exempt all loaded objects from garbage collection, and turn automatic collection off."""
    gc.collect()
    gc.freeze()
    gc.disable()


def run_script(worker: Worker, script: Script) -> None:
    """Run every step of `script` in order, and drop the replies. The shared memory of the traced run is gone: a target
    evaluates a prompt whose KV it adopted there."""
    for step in script:
        adopts = isinstance(step, Start) and step.adopt is not None
        if isinstance(step, Start) and adopts:
            _drain(worker.handle(msgspec.structs.replace(step, adopt=None)))
        elif step is not None:
            _drain(worker.handle(step))
        elif worker.has_work:
            _drain(worker.work())
        while isinstance(step, Start) and adopts and step.plan is None and worker.has_work:
            _drain(worker.work())


def _drain(replies: Iterable[WorkerReply]) -> None:
    for _ in replies:
        pass
