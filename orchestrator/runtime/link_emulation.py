"""A wire to a worker on another machine, where there is none: messages that arrive later, in order. Pure.

Packets get lost, and TCP sends them again. A receiver that sees later packets says so, and after the third one
the sender repeats the lost one at once (fast retransmit, RFC 5681); without them it waits for its timer, which on Linux
is the round trip and 200 ms. Either way everything behind the lost packet waits, for TCP keeps order.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta

TIMEOUT = 0.2
"""Seconds beyond a round trip until a sender that hears nothing sends again; doubled each time."""
_LATER_PACKETS = 3
"""That arrive behind a hole and make the sender fill it."""

T = TypeVar("T")
Out = TypeVar("Out")
Back = TypeVar("Back")


class EmulatedLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way between the orchestrator and one worker, the same in both directions."""

    delay: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.0
    """Seconds, one way."""
    loss: Annotated[float, Meta(ge=0.0, le=0.5)] = 0.0
    """Share of packets that don't get through at first; a message is one packet."""
    seed: int = 0
    """Of which ones."""


@dataclass(slots=True)
class _Packet(Generic[T]):
    item: T
    due: float
    lost: bool


class EmulatedWire(Generic[T]):
    """One direction of a link."""

    def __init__(self, link: EmulatedLink, chance: Callable[[], float]) -> None:
        """`chance`: a number in [0, 1), another one at each call."""
        self._link = link
        self._chance = chance
        self._packets: deque[_Packet[T]] = deque()

    def send(self, item: T, now: float) -> None:
        """Something leaves at `now`, in seconds; no earlier than what was sent before."""
        if len(self._packets) >= _LATER_PACKETS and (hole := self._packets[-_LATER_PACKETS]).lost:
            # This one gets there, the receiver's third repeated answer comes back, and the lost one goes out again.
            hole.due = min(hole.due, now + 3 * self._link.delay)
        self._packets.append(self._packet(item, now))

    def due(self) -> float | None:
        """When something arrives next; None if nothing is on its way."""
        return self._packets[0].due if self._packets else None

    def arrived(self, now: float) -> list[T]:
        """What has arrived by now, in the order in which it was sent."""
        items: list[T] = []
        while self._packets and self._packets[0].due <= now:
            items.append(self._packets.popleft().item)
        return items

    def _packet(self, item: T, now: float) -> _Packet[T]:
        due, timeout = now + self._link.delay, TIMEOUT + 2 * self._link.delay
        lost = False
        while self._chance() < self._link.loss:
            lost = True
            due += timeout
            timeout *= 2
        return _Packet(item, due, lost)


class EmulatedLinks(Generic[Out, Back]):
    """Both directions of the way to each worker, which is known by its incarnation."""

    def __init__(self, link: EmulatedLink) -> None:
        self._link = link
        self._out: dict[int, EmulatedWire[Out]] = {}
        self._back: dict[int, EmulatedWire[Back]] = {}

    def tell(self, incarnation: int, item: Out, now: float) -> None:
        """Something leaves for a worker."""
        self._wire(self._out, incarnation, 0).send(item, now)

    def hear(self, incarnation: int, item: Back, now: float) -> None:
        """Something leaves a worker."""
        self._wire(self._back, incarnation, 1).send(item, now)

    def due(self) -> float | None:
        """When something arrives next, on either side."""
        dues = (wire.due() for wires in (self._out, self._back) for wire in wires.values())
        return min((due for due in dues if due is not None), default=None)

    def arrived_there(self, now: float) -> list[Out]:
        """What workers get to hear by now."""
        return [item for wire in self._out.values() for item in wire.arrived(now)]

    def arrived_here(self, now: float) -> list[Back]:
        """What workers said and what is here by now."""
        return [item for wire in self._back.values() for item in wire.arrived(now)]

    def cut(self, incarnation: int) -> None:
        """This worker is gone, and with it what was on its way."""
        self._out.pop(incarnation, None)
        self._back.pop(incarnation, None)

    def _wire(self, wires: dict[int, EmulatedWire[T]], incarnation: int, direction: int) -> EmulatedWire[T]:
        if incarnation not in wires:
            source = random.Random(f"{self._link.seed} {incarnation} {direction}")  # noqa: S311 - nothing secret
            wires[incarnation] = EmulatedWire(self._link, source.random)
        return wires[incarnation]
