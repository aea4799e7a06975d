"""A whole pipeline in virtual time: the real state machine, the real workers behind wires, clients. Nothing fails.

The same arguments give the same run, event by event.
"""

from dataclasses import dataclass, field

from orchestrator.core.commands import (
    Command,
    Emit,
    Finish,
    SendMessage,
)
from orchestrator.core.events import Arrived, Event, Submitted, Task, Tick, WorkerUp
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.lab.simulate.acceptance import Language
from orchestrator.lab.simulate.devices import Wire, Wires
from orchestrator.lab.simulate.worker_host import BuildWorker, Contention, SimulatedWorker, VirtualClock, WorkerHost
from protocol.messages.base import RequestId, Role
from protocol.messages.client import Statistics
from protocol.messages.sampling import Sampling, TokenLogprob
from protocol.messages.worker import FromWorker, ToWorker


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
    host = WorkerHost

    def __init__(
        self,
        options: Options,
        language: Language,
        build: BuildWorker,
        wires: Wires | None = None,
        seed: int = 0,
        slow_down: float = 1.0,
    ) -> None:
        """`build` makes the pipeline's own workers; `seed` names the wires; `slow_down`: factor on the time of own
        workers that compute together."""
        self.clock = VirtualClock()
        self._contention = Contention(self.clock, slow_down)
        self.options = options
        self.language = language
        self.wires = wires or Wires()
        self.machine = Machine(options)
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

    # Clients ----------------------------------------------------------------------------------

    def submit(self, number: int, max_tokens: int, temperature: float = 0.0) -> RequestId:
        """Submit request `number` of the language."""
        sampling = Sampling(temperature=temperature, seed=number)
        return self.submit_task(Task(self.language.prompt(number), sampling, max_tokens, frozenset()))

    def submit_task(self, task: Task) -> RequestId:
        id = RequestId(self.first_sequence + self._requests)
        self._requests += 1
        self.clients[id] = SimulatedClient(task, self._reference(task))
        self.live.add(id)
        self.step(Submitted(id, task))
        return id

    def _reference(self, task: Task) -> list[int]:
        """The tokens of target-only decoding with an unlimited context."""
        tokens: list[int] = []
        for position in range(len(task.tokens), len(task.tokens) + task.max_tokens):
            tokens.append(self.language.token(task.sampling.seed, position))
            if tokens[-1] in task.eos_tokens:
                break
        return tokens

    # Workers ----------------------------------------------------------------------------------

    def start(self, role: Role) -> WorkerHost:
        """Start a life of the pipeline's own worker."""
        host = self.add_host(self.build(role), contention=self._contention)
        self.own[role] = host.incarnation
        self.loaded(host)
        return host

    def loaded(self, host: WorkerHost, *, remote: bool = False) -> None:
        """A worker has loaded its model."""
        if host.alive:
            host.is_up = True
            self.step(WorkerUp(host.incarnation, host.worker.hello, remote))

    def add_host(
        self, worker: SimulatedWorker, wire: Wire | None = None, contention: Contention | None = None
    ) -> WorkerHost:
        self._incarnations += 1
        role, incarnation, machine = worker.hello.role, self._incarnations, self.machine

        def deliver(message: FromWorker) -> None:
            # Messages of a dead worker still arrive, but only in the same life of the orchestrator.
            if machine is self.machine:
                self.receive(role, incarnation, message)

        wire = wire or (self.wires.target if role == "target" else self.wires.draft)
        host = self.host(worker, incarnation, self.clock, wire, self._seed, deliver, contention)
        self.hosts[incarnation] = host
        return host

    # The orchestrator -------------------------------------------------------------------------

    def step(self, event: Event) -> list[Command]:
        """Fold an event into the machine and perform its commands, as the runtime does."""
        commands = list(self.machine.step(event, self.now).all())
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
                self.end(sequence, reason)
                self.clients[sequence].statistics = statistics
            case _:
                pass

    def end(self, sequence: RequestId, reason: str) -> None:
        self.live.remove(sequence)
        self.clients[sequence].reason = reason
