"""A hub that emulates a slow link to some of its peers. Knows sockets; `link_emulation` knows the link."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from orchestrator.runtime.link_emulation import EmulatedLink, EmulatedLinks
from protocol.messages.base import Message
from protocol.transport.codec import Stamp
from protocol.transport.hub import Arrival, Hub

_MILLISECOND = 1e-3
_SLEEP_SECONDS = 1e-4


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
