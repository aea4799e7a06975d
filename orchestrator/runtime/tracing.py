"""What the orchestrator process does and sees while it is profiled: spans, messages with their times, clocks.

Knows what messages mean for time; decides nothing. Nothing is written before the end.
"""

import time
from array import array
from collections import deque
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from protocol.messages.base import Message, NodeId, Role, SequenceId
from protocol.messages.worker import Forest, Grow, Hello, Ping, Pong, Prefilled, Reroot, Start, Stop, Verdict, Verify
from protocol.worker.clock import ClockProbes
from protocol.worker.spans import SpanKind, SpanRing

_MOST_MESSAGES = 1 << 17
_PROBES = 200
"""Sent to each worker one after the other as soon as it is up, when it has nothing else to do."""
_FILE = "trace.json"

Telling: TypeAlias = Start | Verify | Reroot | Prefilled | Verdict | Grow
"""Messages that a profile is made of."""


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """A message that came or went."""

    at: int
    """Nanoseconds on the orchestrator's clock: when it had been read, or when its sending began."""
    role: Role
    """Who said it, or to whom it was said."""
    incarnation: int
    serial: int
    """For a Grow: the how manieth of this worker."""
    message: Telling


class Traced(msgspec.Struct, frozen=True):
    """A worker's life."""

    role: Role
    incarnation: int
    device: str
    model: str
    ahead: int
    """Its clock minus the orchestrator's, in nanoseconds."""
    error: int | None
    """Nanoseconds that `ahead` may be off; None if it told no time."""


class _Growth(NamedTuple):
    """A Grow, packed: kept as it came, its thousands of numbers would push everything else out of the caches."""

    at: int
    incarnation: int
    serial: int
    sequence: SequenceId
    round: int
    evaluated: int
    parents: "array[int]"
    tokens: "array[int]"

    @classmethod
    def of(cls, grow: Grow, at: int, incarnation: int, serial: int) -> "_Growth":
        parents, tokens = array("q", grow.parents), array("i", grow.tokens)
        return cls(at, incarnation, serial, grow.sequence, grow.round, grow.evaluated, parents, tokens)

    def seen(self) -> Seen:
        """Without the draft's probabilities, which no figure is made of."""
        parents, tokens = tuple(map(NodeId, self.parents)), tuple(self.tokens)
        grow = Grow(self.sequence, self.round, parents, tokens, (0.0,) * len(tokens), self.evaluated, 0.0)
        return Seen(self.at, "draft", self.incarnation, self.serial, grow)


class Record(msgspec.Struct, frozen=True):
    """All that is written besides the spans."""

    workers: tuple[Traced, ...]
    seen: tuple[Seen, ...]
    lost: int
    """Older messages that were not kept."""


def load_record(folder: Path) -> Record:
    """Raises OSError if no orchestrator wrote one there."""
    return msgspec.json.decode((folder / _FILE).read_bytes(), type=Record)


class Trace:
    """Nobody looks: nothing is kept. What `Recording` does, it does at these moments."""

    def now(self) -> int:
        return 0

    def woke(self) -> None:
        """The poll returned: something has arrived."""

    def arrived(self, role: Role, incarnation: int, message: Message) -> None:
        """A worker's message was read."""

    def stepped(self, began: int) -> None:
        """What an event led to is done; it was taken up at `began`."""

    def told(self, role: Role, incarnation: int, message: Message, began: int) -> None:
        """A message was sent to a worker."""

    def probe(self, incarnation: int) -> Ping | None:
        """What to ask this worker now in order to learn its clock."""

    def save(self) -> None:
        """The end."""


class Recording(Trace):
    """Keeps the newest spans and messages for `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ring = SpanRing()
        self._since = self._ring.now()
        self._seen: deque[Seen | _Growth] = deque(maxlen=_MOST_MESSAGES)
        self._count = 0
        self._grows: dict[int, int] = {}
        self._hellos: dict[int, Hello] = {}
        self._probes: dict[int, ClockProbes] = {}
        self._free: dict[SequenceId, int] = {}
        """Since when the target could have been at work for a sequence; 0 within the step that found out."""

    def now(self) -> int:
        return self._ring.now()

    def woke(self) -> None:
        self._since = self._ring.now()

    def arrived(self, role: Role, incarnation: int, message: Message) -> None:
        now = self._ring.now()
        match message:
            case Verdict() | Prefilled():
                self._free[message.sequence] = 0
                self._keep(now, role, incarnation, message)
            case Grow():
                self._grows[incarnation] = self._grows.get(incarnation, 0) + 1
                self._count += 1
                self._seen.append(_Growth.of(message, now, incarnation, self._grows[incarnation]))
            case Hello():
                self._hellos[incarnation] = message
                self._probes[incarnation] = ClockProbes()
            case Pong() if message.clock and incarnation in self._probes:
                self._probes[incarnation].add(round(message.sent * 1e9), message.clock, now)
        self._ring.add(SpanKind.MESSAGE, self._since, now)
        self._since = now

    def stepped(self, began: int) -> None:
        now = self._since = self._ring.now()
        self._ring.add(SpanKind.STEP, began, now)
        for sequence, since in self._free.items():
            self._free[sequence] = since or now

    def told(self, role: Role, incarnation: int, message: Message, began: int) -> None:
        match message:
            case Verify():
                self._asked(message, began, role, incarnation)
            case Forest(trees):
                for verify in trees:
                    self._asked(verify, began, role, incarnation)
            case Start() | Reroot():
                self._keep(began, role, incarnation, message)
            case Stop():
                self._free.pop(message.sequence, None)
        self._ring.add(SpanKind.MESSAGE, began, self._ring.now())

    def _asked(self, verify: Verify, began: int, role: Role, incarnation: int) -> None:
        self._keep(began, role, incarnation, verify)
        since = self._free.pop(verify.sequence, 0)
        if since:
            self._ring.add(SpanKind.WAIT, since, began, verify.sequence, verify.round)

    def probe(self, incarnation: int) -> Ping | None:
        probes = self._probes.get(incarnation)
        return Ping(time.perf_counter()) if probes is not None and probes.count < _PROBES else None

    def save(self) -> None:
        self._ring.save(self._folder / "orchestrator.spans")
        workers = tuple(self._worker(incarnation, hello) for incarnation, hello in self._hellos.items())
        record = Record(
            workers,
            tuple(each.seen() if isinstance(each, _Growth) else each for each in self._seen),
            self._count - len(self._seen),
        )
        (self._folder / _FILE).write_bytes(msgspec.json.encode(record))

    def _keep(self, at: int, role: Role, incarnation: int, message: Telling) -> None:
        self._count += 1
        self._seen.append(Seen(at, role, incarnation, 0, message))

    def _worker(self, incarnation: int, hello: Hello) -> Traced:
        best = self._probes[incarnation].best
        if best is None:
            return Traced(hello.role, incarnation, hello.device, hello.model, 0, None)
        # Within the error there is no sign of another clock, and workers on this machine do have ours.
        ahead = best.ahead if abs(best.ahead) > best.error else 0
        return Traced(hello.role, incarnation, hello.device, hello.model, ahead, best.error)
