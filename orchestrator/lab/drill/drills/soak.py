"""One pipeline for a long time, with constant requests and a fault every few seconds: no resource may grow.

Faults are signals to workers, disconnected clients, invalid frames at the sockets.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import zmq

from orchestrator.api.client import STAMP, Client
from orchestrator.api.pipeline import Pipeline
from orchestrator.lab.drill.drill_requests import DrillRequest, drill_requests, serve, wrong
from orchestrator.lab.drill.outcome import DrillOutcome, OnStep, left_behind
from orchestrator.lab.drill.processes import (
    Usage,
    at_work,
    every,
    figures,
    growth,
    levels,
    mark,
    members,
    own_registry,
    remains,
    usages,
)
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
        self._source = random.Random(seed)
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


PROMISE = "soak, a fault every 5 s: every answer exact; memory, descriptors and threads flat"
FAULT_SECONDS = 5.0
_CLIENTS = 2
_WATCHED = ("orchestrator", "target_worker", "draft_worker", "client")


@dataclass(slots=True)
class RequestLoop:
    """A client that sends one request after the other, on a thread of its own."""

    address: str
    requests: Sequence[DrillRequest]
    first: int
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.ended.is_set():
            request = self.requests[(self.first + self.answered) % len(self.requests)]
            self.failures += wrong(request, serve(Client(self.address), request), f"answer {self.answered}")
            self.answered += 1


def run(count: int, seed: int, on_step: OnStep) -> DrillOutcome:
    """`count` faults, one every five seconds."""
    with own_registry():
        requests = drill_requests(seed)
        with Pipeline(draft_engine="mlx") as pipeline:
            place = mark(pipeline.address)
            loops = [RequestLoop(pipeline.address, requests, first) for first in range(_CLIENTS)]
            with at_work(loops):
                samples = _inject_faults(FaultInjector(pipeline.address, place, requests, seed), place, count, on_step)
            failures = [text for loop in loops for text in loop.failures]
            failures += wrong(requests[0], serve(pipeline, requests[0]), "after the last fault")
        failures += left_behind("at the end", remains(place))
    answered = sum(loop.answered for loop in loops)
    measured = f"{count} faults, {answered} answers, {len(failures)} failures; {levels('orchestrator', samples)}"
    measures = {"faults": count, "answers": answered, **figures(_WATCHED, samples)}
    return DrillOutcome(
        PROMISE, measured, [f"seed {seed}: {text}" for text in failures + growth(_WATCHED, samples)], (), measures
    )


def _inject_faults(injector: FaultInjector, place: str, count: int, on_step: OnStep) -> list[dict[str, Usage]]:
    """Inject `count` faults; returns what every process held just before each."""
    samples: list[dict[str, Usage]] = []
    for number in every(FAULT_SECONDS, count):
        samples.append(usages({**members(place), "client": os.getpid()}))
        injector.faults[number % len(injector.faults)]()
        on_step()
    return samples
