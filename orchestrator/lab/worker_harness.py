"""Worker processes without an orchestrator: starts them, sends them synthetic load, receives the answers."""

import os
import time
from collections.abc import Mapping
from itertools import count
from typing import Any, Self, TypeVar

import numpy as np
import zmq

from orchestrator.machine.neural_engine import LIMITS, Limits
from orchestrator.runtime.hub import Arrival, Hub
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.runtime.workers.supervisor import Supervisor
from protocol.errors import PipelineError
from protocol.messages.base import NodeId, RequestId, Role
from protocol.messages.plans import BestFirst
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Fault, FromWorker, Hello, Shutdown, Start, Stop, ToWorker, Verdict, Verify
from protocol.speculation.token_tree import node_id
from protocol.transport import Stamp

PROMPT_TOKENS = 64
"""Prompt length of the sequences whose steps are measured."""
_MAX_GROWN = 256
"""Tree nodes after which a new sequence starts: a draft stops growing a large tree."""
_FAN = 8
"""Gives wide steps early, with room for one of them below that number of nodes."""


class RandomSequences:
    """Sequences of random tokens for one worker."""

    def __init__(self, hello: Hello, seed: int = 0) -> None:
        self.context = hello.context
        self._vocabulary = hello.vocabulary
        self._random = np.random.default_rng(seed)
        self._ids = map(RequestId, count(1))

    def start(self, tokens: int, plan: BestFirst | None = None) -> Start:
        """A new sequence of `tokens` tokens, the root included."""
        return Start(
            request=next(self._ids),
            round=0,
            tokens=self.tokens(tokens),
            root=NodeId(int(self._random.integers(1 << 62))),
            sampling=Sampling(),
            plan=plan,
        )

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.integers(self._vocabulary, size=count).tolist())


class VerifyLoad:
    """One sequence at a target that verifies chains of random tokens."""

    def __init__(self, sequences: RandomSequences, tokens: int = PROMPT_TOKENS) -> None:
        """`tokens`: of the prompt."""
        self._questions = sequences
        self.start = sequences.start(tokens)
        self._root, self._last = self.start.root, self.start.tokens[-1]
        self._round, self._position = 0, tokens - 1
        self._asked: Verify | None = None

    def has_room(self, width: int) -> bool:
        return self._position + width < self._questions.context

    def ask(self, width: int) -> Verify:
        """A chain of `width` tokens, root included."""
        tokens = (self._last, *self._questions.tokens(width - 1))
        parents = tuple(range(-1, width - 1))
        self._asked = Verify(self.start.request, self._round, self._root, self._position, tokens, parents)
        return self._asked

    def heard(self, verdict: Verdict) -> None:
        assert self._asked is not None
        accepted = self._asked.tokens[1 : 1 + len(verdict.path)]
        self._root = node_id((self._root, *verdict.path)[-1], verdict.bonus)
        self._last = verdict.bonus
        self._round += 1
        self._position += len(accepted) + 1


class GrowthLoad:
    """Sequences at a draft that grows `width` nodes a step, each until its tree is full."""

    def __init__(self, sequences: RandomSequences, width: int) -> None:
        self._questions = sequences
        self._plan = BestFirst(width=width, fan=_FAN)
        self._sequence: RequestId | None = None
        self._grown = 0

    def begin(self) -> list[Stop | Start]:
        """End the current sequence and start another."""
        old = self.end()
        start = self._questions.start(PROMPT_TOKENS, self._plan)
        self._sequence, self._grown = start.request, 0
        return [*old, start]

    def end(self) -> list[Stop]:
        """End the current sequence."""
        return [] if self._sequence is None else [Stop(self._sequence)]

    def heard(self, sequence: RequestId, nodes: int) -> bool:
        """Count new nodes of the current sequence; returns whether a new sequence must start."""
        if sequence == self._sequence:
            self._grown += nodes
        return self._grown >= _MAX_GROWN


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
