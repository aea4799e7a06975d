"""The faults of the soak: signals to workers, disconnected clients, invalid frames at the sockets."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq

from orchestrator.api.client import STAMP, Client
from orchestrator.lab.drill.drill_requests import DrillRequest
from orchestrator.lab.drill.processes import members
from protocol.messages.base import Message, SequenceId
from protocol.messages.client import Cancel
from protocol.messages.worker import Ping, Verdict
from protocol.transport.codec import Stamp, encode
from protocol.transport.sockets import connected_dealer

_SEND_SECONDS = 0.05
"""Time for frames to leave before a socket is closed."""


class FaultInjector:
    """Injects faults into a running pipeline."""

    def __init__(self, address: str, place: str, requests: list[DrillRequest], seed: int) -> None:
        """`place`: the text that marks its processes' command lines."""
        self._address = address
        self._place = place
        self._requests = requests
        self._source = random.Random(seed)  # noqa: S311 - no secret
        self._context = zmq.Context[Any].instance()
        self.faults: list[Callable[[], None]] = [
            self.kill_draft,
            self.garbage_to_client_socket,
            self.stop_target,
            self.disconnect_client,
            self.kill_target,
            self.garbage_to_worker_socket,
            self.stop_draft,
        ]
        """The registry. With five seconds between faults, this order kills no role three times a minute."""

    def kill_draft(self) -> None:
        self._signal("draft_worker", signal.SIGKILL)

    def kill_target(self) -> None:
        self._signal("target_worker", signal.SIGKILL)

    def stop_draft(self) -> None:
        self._pause("draft_worker", 2.0)

    def stop_target(self) -> None:
        self._pause("target_worker", 0.5)

    def disconnect_client(self) -> None:
        """A client that disconnects after the first pieces."""
        request = self._source.choice(self._requests)
        stream = Client(self._address).stream(request.prompt, request.params)
        for count, _ in enumerate(stream):
            if count == self._source.randrange(1, 9):
                break
        stream.close()

    def garbage_to_client_socket(self) -> None:
        """Random bytes, damaged frames and multipart messages at the clients' socket."""
        self._send(self._address, [encode(Cancel("nobody's"), STAMP), encode(Cancel("x" * 40), Stamp(7, 7))])

    def garbage_to_worker_socket(self) -> None:
        """Random bytes, and messages with stamps of other workers, at the workers' socket."""
        address = self._address.removesuffix("clients") + "workers"
        stale: list[Message] = [Verdict(SequenceId(1), 1, (), 1, 0.1), Ping(1.0)]
        self._send(address, [encode(message, Stamp(self._source.randrange(1 << 30), 1)) for message in stale])

    def _send(self, address: str, frames: list[bytes]) -> None:
        socket = connected_dealer(self._context, address)
        for _ in range(50):
            frame = bytearray(self._source.choice(frames))
            socket.send(bytes(frame))
            frame[self._source.randrange(len(frame))] ^= 1 << self._source.randrange(8)
            socket.send(bytes(frame))
            socket.send(self._source.randbytes(self._source.randrange(300)))
        socket.send_multipart([b"several", b"frames"])
        time.sleep(_SEND_SECONDS)
        socket.close()

    def _signal(self, program: str, kind: signal.Signals) -> int | None:
        pid = members(self._place).get(program)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, kind)
        return pid

    def _pause(self, program: str, seconds: float) -> None:
        pid = self._signal(program, signal.SIGSTOP)
        if pid is not None:
            time.sleep(seconds)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
