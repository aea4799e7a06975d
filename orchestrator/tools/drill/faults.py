"""Single faults that a running pipeline must bear, to be drawn from again and again. Knows sockets and signals."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq

from orchestrator.api.client import STAMP, Client
from orchestrator.tools.drill.exchange import DrillRequest
from orchestrator.tools.drill.processes import members
from protocol.messages.base import Message, SequenceId
from protocol.messages.client import Cancel
from protocol.messages.worker import Ping, Verdict
from protocol.transport.codec import Stamp, encode
from protocol.transport.sockets import connected_dealer

_SETTLING = 0.05
"""Seconds for frames to leave before a socket is closed."""


class Victim:
    """A running pipeline and what can be done to it."""

    def __init__(self, address: str, place: str, questions: list[DrillRequest], seed: int) -> None:
        """`place`: what its processes' command lines contain."""
        self._address = address
        self._place = place
        self._questions = questions
        self._source = random.Random(seed)  # noqa: S311 - no secret
        self._context = zmq.Context[Any].instance()
        self.faults: list[Callable[[], None]] = [
            self.kill_draft,
            self.junk_to_clients,
            self.stop_target,
            self.abandon,
            self.kill_target,
            self.junk_to_workers,
            self.stop_draft,
        ]
        """In an order that, with five seconds between them, kills no role three times a minute."""

    def kill_draft(self) -> None:
        self._signal("draft_worker", signal.SIGKILL)

    def kill_target(self) -> None:
        self._signal("target_worker", signal.SIGKILL)

    def stop_draft(self) -> None:
        self._pause("draft_worker", 2.0)

    def stop_target(self) -> None:
        self._pause("target_worker", 0.5)

    def abandon(self) -> None:
        """A client that asks for much and is gone without a word after the first pieces."""
        question = self._source.choice(self._questions)
        stream = Client(self._address).stream(question.prompt, question.params)
        for count, _ in enumerate(stream):
            if count == self._source.randrange(1, 9):
                break
        stream.close()

    def junk_to_clients(self) -> None:
        """Noise, several frames, requests that are none, at the clients' socket."""
        self._send(self._address, [encode(Cancel("nobody's"), STAMP), encode(Cancel("x" * 40), Stamp(7, 7))])

    def junk_to_workers(self) -> None:
        """Noise and messages of workers of other lives, at the workers' socket."""
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
        time.sleep(_SETTLING)
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
