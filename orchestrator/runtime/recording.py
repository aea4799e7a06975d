"""What an orchestrator records: its events, for a replay, and spans and messages with their times, for a profile.

Decides nothing.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from orchestrator.core.events import Arrived, Ended, Event, Submitted, Tick, WorkerDown, WorkerUp
from protocol.errors import InputError
from protocol.messages.base import Message, RequestId, Role
from protocol.messages.worker import Forest, Grow, Hello, Prefilled, Reroot, Start, Stop, Verdict, Verify
from protocol.security.private_files import open_private
from protocol.worker.spans import SpanKind, SpanRing

_MAX_MESSAGES = 1 << 17
_LONGEST_LINE = 64 << 20
"""Bytes; the longest event holds a context's tokens. What is longer is no journal."""
_FILE = "trace.json"
_EVENTS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Submitted, Ended, WorkerUp, WorkerDown, Arrived, Tick)
}


class Journal:
    """Appends each event with its time to a file at once, as one JSON array a line, so that the record of a killed
    orchestrator is whole."""

    def __init__(self, path: str) -> None:
        """Raises InputError for a file that can't be written."""
        try:
            self._file = open_private(Path(path))
        except OSError as error:
            raise InputError(f"The record {path} can't be written ({error.strerror}): choose another file.") from error

    def write(self, event: Event, now: float) -> None:
        self._file.write(msgspec.json.encode([now, type(event).__name__, event]) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def replay(path: Path) -> Iterator[tuple[Event, float]]:
    """The events of a journal and their times, in order."""
    with path.open("rb") as lines:
        for line in iter(lambda: lines.readline(_LONGEST_LINE), b""):
            now, kind, body = msgspec.json.decode(line)
            yield msgspec.convert(body, _EVENTS[kind], strict=False), now


ProfiledMessage: TypeAlias = Start | Verify | Reroot | Prefilled | Verdict | Grow
"""Messages that a profile needs."""


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """A message that was received or sent."""

    at: int
    """Nanoseconds on the orchestrator's clock: after it was read, or before it was sent."""
    role: Role
    """The role of its sender or receiver."""
    incarnation: int
    serial: int
    """For a Grow: its number among those of this worker, from 1 on."""
    message: ProfiledMessage


class Traced(msgspec.Struct, frozen=True):
    """One life of a worker."""

    role: Role
    incarnation: int
    device: str


class Record(msgspec.Struct, frozen=True):
    """The content of the file beside the spans."""

    workers: tuple[Traced, ...]
    seen: tuple[Seen, ...]
    lost: int
    """Older messages that were dropped."""


def load_record(folder: Path) -> Record:
    """The record in `folder`. Raises OSError if there is none."""
    return msgspec.json.decode((folder / _FILE).read_bytes(), type=Record)


class Recording:
    """A `Trace` (`workers/pool.py`) that holds the newest spans and messages.

    It writes them to `folder` at the end, and nothing before.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ring = SpanRing()
        self._since = self._ring.now()
        self._seen: deque[bytes] = deque(maxlen=_MAX_MESSAGES)
        """Each a `Seen`, packed: as objects, thousands of numbers would evict everything else from the caches."""
        self._count = 0
        self._grows: dict[int, int] = {}
        self._hellos: dict[int, Hello] = {}
        self._target_free: dict[RequestId, int] = {}
        """Since when the target has nothing to verify for a sequence; 0 until the end of the current step."""

    def now(self) -> int:
        return self._ring.now()

    def woke(self) -> None:
        self._since = self._ring.now()

    def arrived(self, role: Role, incarnation: int, message: Message) -> None:
        now = self._ring.now()
        match message:
            case Verdict() | Prefilled():
                self._target_free[message.request] = 0
                self._keep(now, role, incarnation, message)
            case Grow():
                self._grows[incarnation] = self._grows.get(incarnation, 0) + 1
                self._keep(now, role, incarnation, message, self._grows[incarnation])
            case Hello():
                self._hellos[incarnation] = message
        self._ring.add(SpanKind.MESSAGE, self._since, now)
        self._since = now

    def stepped(self, began: int) -> None:
        now = self._since = self._ring.now()
        self._ring.add(SpanKind.STEP, began, now)
        for sequence, since in self._target_free.items():
            self._target_free[sequence] = since or now

    def sent(self, role: Role, incarnation: int, message: Message, began: int) -> None:
        match message:
            case Verify():
                self._record_verify(message, began, role, incarnation)
            case Forest(trees):
                for verify in trees:
                    self._record_verify(verify, began, role, incarnation)
            case Start() | Reroot():
                self._keep(began, role, incarnation, message)
            case Stop():
                self._target_free.pop(message.request, None)
        self._ring.add(SpanKind.MESSAGE, began, self._ring.now())

    def _record_verify(self, verify: Verify, began: int, role: Role, incarnation: int) -> None:
        self._keep(began, role, incarnation, verify)
        since = self._target_free.pop(verify.request, 0)
        if since:
            self._ring.add(SpanKind.WAIT, since, began, verify.request, verify.round)

    def save(self) -> None:
        self._ring.save(self._folder / "orchestrator.spans")
        workers = tuple(Traced(hello.role, each, hello.device) for each, hello in self._hellos.items())
        record = Record(
            workers,
            tuple(msgspec.msgpack.decode(each, type=Seen) for each in self._seen),
            self._count - len(self._seen),
        )
        with open_private(self._folder / _FILE) as file:
            file.write(msgspec.json.encode(record))

    def _keep(self, at: int, role: Role, incarnation: int, message: ProfiledMessage, serial: int = 0) -> None:
        self._count += 1
        self._seen.append(msgspec.msgpack.encode(Seen(at, role, incarnation, serial, message)))
