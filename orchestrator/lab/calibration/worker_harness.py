"""Worker processes without an orchestrator: starts them, sends messages, receives the answers."""

import os
import time
from collections.abc import Mapping
from typing import Any, Self, TypeVar

import zmq

from orchestrator.machine.neural_engine.examination import LIMITS, Limits
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.runtime.workers.supervisor import Supervisor
from protocol.errors import PipelineError
from protocol.messages.base import Role
from protocol.messages.worker import Fault, FromWorker, Hello, Shutdown, ToWorker
from protocol.transport.codec import Stamp
from protocol.transport.hub import Arrival, Hub

_LIMITS = LIMITS._replace(silence=120.0)
"""A forward is told when it is done. A worker says nothing while it loads, and Core ML may compile for minutes."""
_POLL_MILLISECONDS = 200

M = TypeVar("M")


class WorkerHarness:
    """A context with workers. Every failure of a worker is a PipelineError."""

    def __init__(
        self,
        setup: OrchestratorSetup,
        session: Session,
        cores: Mapping[Role, tuple[int, ...]],
        limits: Limits = _LIMITS,
    ) -> None:
        """`cores`: as `Supervisor` takes them."""
        self._limits = limits
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
        """Start a role's worker and wait until its model is loaded, as long as its process lives."""
        self._supervisor.start(role)
        while True:
            arrival = self._arrival(self._limits.loading)
            if arrival is None:
                raise PipelineError(
                    f"The {role} worker did not load its model within {self._limits.loading / 60:g} minutes: choose a "
                    "smaller model."
                )
            if isinstance(arrival.message, Hello):
                self._peers[role] = arrival.peer
                return arrival.message

    def send(self, role: Role, message: ToWorker) -> None:
        self._hub.send(self._peers[role], message, Stamp(self._epoch, self._supervisor.children[role].incarnation))

    def receive(self) -> FromWorker:
        """The next message of any worker."""
        arrival = self._arrival(self._limits.silence)
        if arrival is None:
            raise PipelineError(
                f"A worker was silent for {self._limits.silence:g} s: choose smaller models, or see "
                "`launch-pipeline doctor`."
            )
        return arrival.message

    def await_message(self, kind: type[M]) -> M:
        """The next message of this kind; other messages are skipped."""
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message

    def _arrival(self, seconds: float) -> Arrival | None:
        """None if nothing comes for this long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for arrival in self._hub.receive():
                _raise_fault(arrival)
                return arrival
            self._hub.socket.poll(_POLL_MILLISECONDS)
            self._check()
        return None

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
