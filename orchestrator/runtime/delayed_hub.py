"""A hub some of whose peers seem to be on another machine. Knows sockets; `link_emulation` knows the link."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from orchestrator.runtime.link_emulation import EmulatedLink, EmulatedLinks
from protocol.messages.base import Message
from protocol.transport.codec import Stamp
from protocol.transport.hub import Arrival, Hub

_MILLISECOND = 1e-3
_NAP = 1e-4


class DelayedHub(Hub):
    """Delays what goes to far peers and comes from them."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        expected: Any,
        link: EmulatedLink,
        is_far: Callable[[Stamp], bool],
    ) -> None:
        """`is_far`: whether this life of a worker is at the other end of the link."""
        super().__init__(context, address, expected)
        self._is_far = is_far
        self._links = EmulatedLinks[tuple[bytes, Message, Stamp], Arrival](link)

    def send(self, peer: bytes, message: Message, stamp: Stamp) -> bool:
        """As every hub; what is on its way when its peer goes is lost."""
        if not self._is_far(stamp):
            return super().send(peer, message, stamp)
        self._links.tell(stamp.incarnation, (peer, message, stamp), time.monotonic())
        return True

    def receive(self) -> Iterator[Arrival]:
        """As every hub; also delivers what has come all the way, so call it as often as `patience` says."""
        for arrival in super().receive():
            if self._is_far(arrival.stamp):
                self._links.hear(arrival.stamp.incarnation, arrival, time.monotonic())
            else:
                yield arrival
        now = time.monotonic()
        for peer, message, stamp in self._links.arrived_there(now):
            super().send(peer, message, stamp)
        yield from self._links.arrived_here(now)

    def timeout(self, wait: float) -> float:
        """Seconds to poll before the next call, at most `wait`; too short by the millisecond that a poll rounds up.
        Naps through the last one before something arrives, which a poll would oversleep."""
        due = self._links.due()
        left = wait if due is None else due - time.monotonic()
        if left >= wait:
            return wait
        if left < _MILLISECOND:
            time.sleep(min(max(0.0, left), _NAP))
        return left - _MILLISECOND

    def cut(self, incarnation: int) -> None:
        """This life is over."""
        self._links.cut(incarnation)
