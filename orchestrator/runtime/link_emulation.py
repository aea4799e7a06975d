"""Emulates a TCP link to another machine: messages arrive later, in order.

TCP retransmits lost packets. The receiver acknowledges later packets, and after the third one the sender retransmits
the lost packet at once (fast retransmit, RFC 5681); otherwise it waits for its timer, which on Linux is the round trip
and 200 ms. All packets after the lost one wait for it, because TCP keeps order.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import zmq
from msgspec import Meta

from orchestrator.runtime.hub import Arrival, Hub
from protocol.messages.base import Message
from protocol.transport import Stamp

TIMEOUT = 0.2
"""Seconds beyond a round trip until a sender without an acknowledgement retransmits; doubled each time."""
_LATER_PACKETS = 3
"""Packets after a lost one that cause a fast retransmit."""
_MILLISECOND = 1e-3
_SLEEP_SECONDS = 1e-4

T = TypeVar("T")
Out = TypeVar("Out")
Back = TypeVar("Back")


class EmulatedLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The link between the orchestrator and one worker, the same in both directions."""

    delay: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.0
    """Seconds, one way."""
    loss: Annotated[float, Meta(ge=0.0, le=0.5)] = 0.0
    """Share of packets that are lost at first; a message is one packet."""
    seed: int = 0
    """Seed of the choice of lost packets."""


@dataclass(slots=True)
class _Packet(Generic[T]):
    item: T
    due: float
    lost: bool


class EmulatedWire(Generic[T]):
    """One direction of a link."""

    def __init__(self, link: EmulatedLink, random_number: Callable[[], float]) -> None:
        """`random_number` returns a new number in [0, 1) at each call."""
        self._link = link
        self._random_number = random_number
        self._packets: deque[_Packet[T]] = deque()

    def send(self, item: T, now: float) -> None:
        """Send an item at `now`, in seconds; times must not decrease."""
        if len(self._packets) >= _LATER_PACKETS and (missing := self._packets[-_LATER_PACKETS]).lost:
            # One delay each: this packet arrives, the third duplicate acknowledgement returns, the lost packet arrives.
            missing.due = min(missing.due, now + 3 * self._link.delay)
        self._packets.append(self._packet(item, now))

    def due(self) -> float | None:
        """When the next item arrives; None if none is on its way."""
        return self._packets[0].due if self._packets else None

    def arrived(self, now: float) -> list[T]:
        """The items that have arrived by now, in the order of sending."""
        items: list[T] = []
        while self._packets and self._packets[0].due <= now:
            items.append(self._packets.popleft().item)
        return items

    def _packet(self, item: T, now: float) -> _Packet[T]:
        due, timeout = now + self._link.delay, TIMEOUT + 2 * self._link.delay
        lost = False
        while self._random_number() < self._link.loss:
            lost = True
            due += timeout
            timeout *= 2
        return _Packet(item, due, lost)


class EmulatedLinks(Generic[Out, Back]):
    """Both directions of the link to each worker; workers are identified by incarnation."""

    def __init__(self, link: EmulatedLink) -> None:
        self._link = link
        self._out: dict[int, EmulatedWire[Out]] = {}
        self._back: dict[int, EmulatedWire[Back]] = {}

    def send(self, incarnation: int, item: Out, now: float) -> None:
        """An item leaves for a worker."""
        self._wire(self._out, incarnation, 0).send(item, now)

    def receive(self, incarnation: int, item: Back, now: float) -> None:
        """An item leaves a worker."""
        self._wire(self._back, incarnation, 1).send(item, now)

    def due(self) -> float | None:
        """When the next item arrives, at either end; None if none is on its way."""
        dues = (wire.due() for wires in (self._out, self._back) for wire in wires.values())
        return min((due for due in dues if due is not None), default=None)

    def due_at_workers(self, now: float) -> list[Out]:
        """Items that have arrived at workers by now."""
        return [item for wire in self._out.values() for item in wire.arrived(now)]

    def due_here(self, now: float) -> list[Back]:
        """Items from workers that have arrived by now."""
        return [item for wire in self._back.values() for item in wire.arrived(now)]

    def cut(self, incarnation: int) -> None:
        """Drop a worker's items that are on their way."""
        self._out.pop(incarnation, None)
        self._back.pop(incarnation, None)

    def _wire(self, wires: dict[int, EmulatedWire[T]], incarnation: int, direction: int) -> EmulatedWire[T]:
        if incarnation not in wires:
            source = random.Random(f"{self._link.seed} {incarnation} {direction}")  # noqa: S311 - nothing secret
            wires[incarnation] = EmulatedWire(self._link, source.random)
        return wires[incarnation]


class DelayedHub(Hub):
    """Delays messages to and from the peers behind the link."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        expected: Any,
        link: EmulatedLink,
        is_remote: Callable[[Stamp], bool],
    ) -> None:
        """`is_remote`: whether this life of a worker is behind the link."""
        super().__init__(context, address, expected)
        self._is_remote = is_remote
        self._links = EmulatedLinks[tuple[bytes, Message, Stamp], Arrival](link)

    def send(self, peer: bytes, message: Message, stamp: Stamp) -> bool:
        """As `Hub.send`. A delayed message is lost if its peer leaves meanwhile."""
        if not self._is_remote(stamp):
            return super().send(peer, message, stamp)
        self._links.send(stamp.incarnation, (peer, message, stamp), time.monotonic())
        return True

    def receive(self) -> Iterator[Arrival]:
        """As `Hub.receive`. Also delivers delayed messages that are due, so call it as often as `timeout` says."""
        for arrival in super().receive():
            if self._is_remote(arrival.stamp):
                self._links.receive(arrival.stamp.incarnation, arrival, time.monotonic())
            else:
                yield arrival
        now = time.monotonic()
        for peer, message, stamp in self._links.due_at_workers(now):
            super().send(peer, message, stamp)
        yield from self._links.due_here(now)

    def timeout(self, wait: float) -> float:
        """Seconds to poll before the next `receive`, at most `wait`, less the millisecond by which a poll rounds up.

        Sleeps briefly itself in the last millisecond before a message is due, which a poll would miss."""
        due = self._links.due()
        left = wait if due is None else due - time.monotonic()
        if left >= wait:
            return wait
        if left < _MILLISECOND:
            time.sleep(min(max(0.0, left), _SLEEP_SECONDS))
        return left - _MILLISECOND

    def cut(self, incarnation: int) -> None:
        """Drop the delayed messages of an ended life."""
        self._links.cut(incarnation)
