"""Worker processes without an orchestrator: starts them, sends messages, receives the answers."""

import os
import time
from collections.abc import Mapping
from typing import Any, Self, TypeVar

import zmq

from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.runtime.workers.supervisor import Supervisor
from protocol.errors import PipelineError
from protocol.messages.base import Role
from protocol.messages.worker import Fault, FromWorker, Hello, Shutdown, ToWorker
from protocol.transport.codec import Stamp
from protocol.transport.hub import Arrival, Hub

_TIMEOUT_SECONDS = 120.0
"""Maximum time of loading a model or of one forward."""
_POLL_MILLISECONDS = 200

M = TypeVar("M")


class WorkerHarness:
    """A context with workers. Every failure of a worker is a PipelineError."""

    def __init__(self, setup: OrchestratorSetup, session: Session, cores: Mapping[Role, tuple[int, ...]]) -> None:
        """`cores`: as `Supervisor` takes them."""
        self._epoch = int.from_bytes(os.urandom(4)) + 1
        self._session = session
        self._context: zmq.Context[Any] = zmq.Context()
        self._hub = Hub(self._context, session.worker_address, FromWorker)
        self._supervisor = Supervisor(setup, session, self._epoch, cores)
        self._peers: dict[Role, bytes] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for role in self._peers:
            self.send(role, Shutdown())
        self._supervisor.stop([self._supervisor.children[role].incarnation for role in self._peers])
        self._hub.close()
        self._context.term()

    def start(self, role: Role) -> Hello:
        """Start a role's worker and wait until its model is loaded."""
        self._supervisor.start(role)
        while True:
            arrival = self._arrival()
            if isinstance(arrival.message, Hello):
                self._peers[role] = arrival.peer
                return arrival.message

    def send(self, role: Role, message: ToWorker) -> None:
        self._hub.send(self._peers[role], message, Stamp(self._epoch, self._supervisor.children[role].incarnation))

    def receive(self) -> FromWorker:
        """The next message of any worker."""
        return self._arrival().message

    def await_message(self, kind: type[M]) -> M:
        """The next message of this kind; other messages are skipped."""
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message

    def _arrival(self) -> Arrival:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            for arrival in self._hub.receive():
                _raise_fault(arrival)
                return arrival
            self._hub.socket.poll(_POLL_MILLISECONDS)
            self._check()
        raise PipelineError(
            "A worker was silent for two minutes: choose smaller models, or see `launch-pipeline doctor`."
        )

    def _check(self) -> None:
        for role, child in self._supervisor.children.items():
            if child.process.poll() is not None:
                # Its last message may give the reason.
                for arrival in self._hub.receive():
                    _raise_fault(arrival)
                words = self._session.last_words(child.log) or "none"
                raise PipelineError(f"The {role} worker ended while it was measured. Its last words: {words}")


def _raise_fault(arrival: Arrival) -> None:
    if isinstance(arrival.message, Fault):
        raise PipelineError(arrival.message.text)
