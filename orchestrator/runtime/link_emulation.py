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
_OUT, _BACK = 0, 1
"""Directions of a link."""


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
        self._link = link
        self._wires: dict[tuple[int, int], EmulatedWire[Any]] = {}
        """By incarnation of the worker and direction."""

    def send(self, peer: bytes, message: Message, stamp: Stamp) -> bool:
        """As `Hub.send`. A delayed message is lost if its peer leaves meanwhile."""
        if not self._is_remote(stamp):
            return super().send(peer, message, stamp)
        self._wire(stamp.incarnation, _OUT).send((peer, message, stamp), time.monotonic())
        return True

    def receive(self) -> Iterator[Arrival]:
        """As `Hub.receive`. Also delivers delayed messages that are due, so call it as often as `timeout` says."""
        for arrival in super().receive():
            if self._is_remote(arrival.stamp):
                self._wire(arrival.stamp.incarnation, _BACK).send(arrival, time.monotonic())
            else:
                yield arrival
        now = time.monotonic()
        for (_, direction), wire in list(self._wires.items()):
            for item in wire.arrived(now):
                if direction == _BACK:
                    yield item
                else:
                    super().send(*item)

    def timeout(self, wait: float) -> float:
        """Seconds to poll before the next `receive`, at most `wait`, less the millisecond by which a poll rounds up.

        Sleeps briefly itself in the last millisecond before a message is due, which a poll would miss."""
        dues = (wire.due() for wire in self._wires.values())
        due = min((due for due in dues if due is not None), default=None)
        left = wait if due is None else due - time.monotonic()
        if left >= wait:
            return wait
        if left < _MILLISECOND:
            time.sleep(min(max(0.0, left), _SLEEP_SECONDS))
        return left - _MILLISECOND

    def cut(self, incarnation: int) -> None:
        """Drop the delayed messages of an ended life."""
        for direction in (_OUT, _BACK):
            self._wires.pop((incarnation, direction), None)

    def _wire(self, incarnation: int, direction: int) -> EmulatedWire[Any]:
        wire = self._wires.get((incarnation, direction))
        if wire is None:
            source = random.Random(f"{self._link.seed} {incarnation} {direction}")  # noqa: S311 - nothing secret
            wire = self._wires[incarnation, direction] = EmulatedWire(self._link, source.random)
        return wire
