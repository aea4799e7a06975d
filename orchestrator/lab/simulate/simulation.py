"""A whole pipeline in virtual time: the real state machine, the real workers behind wires, clients.

The same arguments give the same run, event by event.
"""

from collections import deque
from dataclasses import dataclass, field

from orchestrator.core.commands import (
    Command,
    Dismiss,
    Emit,
    Finish,
    Pardon,
    Reject,
    Release,
    Replace,
    SendMessage,
    TellReading,
    TrialDecided,
)
from orchestrator.core.events import Arrived, Ended, Event, Submitted, Task, Tick, WorkerDown, WorkerUp
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.lab.simulate.acceptance import Language
from orchestrator.lab.simulate.devices import Wire, Wires
from orchestrator.lab.simulate.worker_host import BuildWorker, Contention, SimulatedWorker, VirtualClock, WorkerHost
from protocol.messages.base import RequestId, Role
from protocol.messages.client import Statistics
from protocol.messages.sampling import Sampling, TokenLogprob
from protocol.messages.worker import FromWorker, ToWorker

_RESTART_SECONDS = 1.0
"""Until the successor of a replaced worker is up."""


@dataclass(slots=True)
class SimulatedClient:
    """One request, and what its client received."""

    task: Task
    reference: list[int]
    """The tokens of target-only decoding."""
    tokens: list[int] = field(default_factory=list)
    prompt_token_logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str = ""
    """Why the request ended; empty while it is live."""
    statistics: Statistics | None = None
    """None while the request is live, and if it was rejected."""


class Simulation:
    """Start workers, submit requests, run, read `clients`."""

    first_sequence = 1
    """Id of the first request; the others follow."""

    def __init__(
        self,
        options: Options,
        language: Language,
        build: BuildWorker,
        wires: Wires | None = None,
        seed: int = 0,
        kept: int | None = 0,
        slow_down: float = 1.0,
    ) -> None:
        """`build` makes the pipeline's own workers; `seed` decides the wires' faults; `kept`: number of the last
        events in `history`, None for all; `slow_down`: factor on the time of own workers that compute together."""
        self.clock = VirtualClock()
        self._contention = Contention(self.clock, slow_down)
        self.options = options
        self.language = language
        self.wires = wires or Wires()
        self.machine = Machine(options)
        self.history: deque[tuple[float, Event, list[Command]]] = deque(maxlen=kept)
        self.clients: dict[RequestId, SimulatedClient] = {}
        self.hosts: dict[int, WorkerHost] = {}
        """Workers that are alive, by incarnation."""
        self.own: dict[Role, int] = {}
        """Incarnations of the latest lives of the pipeline's own workers."""
        self.live: set[RequestId] = set()
        """Requests that have not ended."""
        self.build = build
        self._seed = seed
        self._incarnations = 0
        self._requests = 0

    @property
    def now(self) -> float:
        """Seconds since the simulation began."""
        return self.clock.now

    # Time -------------------------------------------------------------------------------------

    @property
    def next_at(self) -> float | None:
        """Time of the next event; None if there is none."""
        due = [at for at in (self.clock.next_at, self.machine.deadline()) if at is not None]
        return min(due, default=None)

    def advance(self) -> bool:
        """Process the next event; False if there is none."""
        at = self.next_at
        if at is None:
            return False
        if at == self.clock.next_at:
            self.clock.advance()
        else:
            self.clock.now = max(self.now, at)
            self.step(Tick())
        return True

    def run(self) -> None:
        """Advance until every request has ended."""
        while self.live:
            assert self.advance(), "requests are live and no event is due"

    def run_until(self, time: float) -> None:
        """Process all events up to `time`."""
        while (at := self.next_at) is not None and at <= time:
            self.advance()
        self.clock.now = max(self.now, time)

    # Clients ----------------------------------------------------------------------------------

    def submit(
        self,
        number: int,
        max_tokens: int,
        temperature: float = 0.0,
        prompt: tuple[int, ...] | None = None,
        ends: frozenset[int] = frozenset(),
        prompt_logprobs: bool = False,
        background: bool = False,
        seeded: bool = False,
    ) -> RequestId:
        """Submit request `number` of the language, with its own prompt unless another one is given."""
        tokens = self.language.prompt(number) if prompt is None else prompt
        sampling = Sampling(temperature=temperature, seed=number, prompt_logprobs=prompt_logprobs)
        task = Task(tokens, sampling, max_tokens, ends, background=background, seeded=seeded)
        id = RequestId(self.first_sequence + self._requests)
        self._requests += 1
        self.clients[id] = SimulatedClient(task, self._reference(task))
        self.live.add(id)
        self.step(Submitted(id, task))
        return id

    def cancel(self, sequence: RequestId) -> None:
        self.step(Ended(sequence, "cancelled"))

    def _reference(self, task: Task) -> list[int]:
        """The tokens of target-only decoding with an unlimited context."""
        tokens: list[int] = []
        for position in range(len(task.tokens), len(task.tokens) + task.max_tokens):
            tokens.append(self.language.token(task.sampling.seed, position))
            if tokens[-1] in task.eos_tokens:
                break
        return tokens

    # Workers ----------------------------------------------------------------------------------

    def start(self, role: Role, loading: float = 0.0) -> WorkerHost:
        """Start a life of the pipeline's own worker, which loads its model for `loading` seconds."""
        host = self._host(self.build(role), contention=self._contention)
        self.own[role] = host.incarnation
        self._load(host, loading, remote=False)
        return host

    def attach(self, draft: SimulatedWorker, loading: float = 0.0, wire: Wire | None = None) -> WorkerHost:
        """Start a draft of another machine."""
        host = self._host(draft, wire)
        self._load(host, loading, remote=True)
        return host

    def remove(self, incarnation: int) -> None:
        """End a worker's process or its connection."""
        host = self.hosts.pop(incarnation)
        host.alive = False
        if host.is_up:
            self.step(WorkerDown(host.role, incarnation))

    def kill(self, role: Role) -> bool:
        """End the pipeline's own worker of this role; False if it is dead already."""
        if self.own.get(role) not in self.hosts:
            return False
        self.remove(self.own[role])
        return True

    def replace(self, role: Role) -> None:
        """Kill a worker that does not answer and start another one."""
        self.kill(role)
        self.start(role, _RESTART_SECONDS)

    def _host(
        self, worker: SimulatedWorker, wire: Wire | None = None, contention: Contention | None = None
    ) -> WorkerHost:
        self._incarnations += 1
        role, incarnation, machine = worker.hello.role, self._incarnations, self.machine

        def deliver(message: FromWorker) -> None:
            # Messages of a dead worker still arrive, but only in the same life of the orchestrator.
            if machine is self.machine:
                self.receive(role, incarnation, message)

        wire = wire or (self.wires.target if role == "target" else self.wires.draft)
        host = WorkerHost(worker, incarnation, self.clock, wire, self._seed, deliver, contention)
        self.hosts[incarnation] = host
        return host

    def _load(self, host: WorkerHost, seconds: float, remote: bool) -> None:
        def loaded() -> None:
            if host.alive:
                host.is_up = True
                self.step(WorkerUp(host.incarnation, host.worker.hello, remote))

        if seconds > 0.0:
            self.clock.at(self.now + seconds, loaded)
        else:
            loaded()

    # The orchestrator -------------------------------------------------------------------------

    def step(self, event: Event) -> list[Command]:
        """Fold an event into the machine and perform its commands, as the runtime does."""
        commands: list[Command] = []
        self.history.append((self.now, event, commands))
        commands += self.machine.step(event, self.now).all()
        for command in commands:
            self.perform(command)
        return commands

    def send(self, incarnation: int, message: ToWorker) -> None:
        self.hosts[incarnation].send(message)

    def receive(self, role: Role, incarnation: int, message: FromWorker) -> None:
        self.step(Arrived(role, incarnation, message))

    def perform(self, command: Command) -> None:
        match command:
            case SendMessage(role, message, incarnation):
                self.send(self.own[role] if incarnation is None else incarnation, message)
            case Emit(sequence, tokens, prompt_token_logprobs=told):
                self.clients[sequence].tokens += tokens
                self.clients[sequence].prompt_token_logprobs += told
            case Finish(sequence, reason, statistics):
                self._end(sequence, reason)
                self.clients[sequence].statistics = statistics
            case Reject(sequence, text):
                self._end(sequence, text)
            case Replace(role):
                self.replace(role)
            case Dismiss(_, incarnation):
                self.remove(incarnation)
            case Release() | TrialDecided() | TellReading() | Pardon():
                pass

    def _end(self, sequence: RequestId, reason: str) -> None:
        self.live.remove(sequence)
        self.clients[sequence].reason = reason
