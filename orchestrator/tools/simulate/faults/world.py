"""The whole system on a virtual clock: the real state machine and restart policy, modelled workers, bad wires. Pure.

What the orchestrator's shell does with processes and clients is done here without any. Every event is followed
by the invariants; what a client gets is compared with target-only decoding, token by token.
"""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.core.commands import Command, Dismiss, Emit, Finish, Reject, Replace, SendMessage
from orchestrator.core.events import Arrived, Ended, Event, Request, Submitted, Tick, WorkerDown, WorkerUp
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.core.restarts import RestartPolicy
from orchestrator.tools.simulate.devices import Wire
from orchestrator.tools.simulate.faults.invariants import Invariants, Violation
from orchestrator.tools.simulate.modelled_worker import ModelledWorker
from orchestrator.tools.simulate.virtual_clock import VirtualClock
from orchestrator.tools.simulate.worker_host import WorkerHost
from protocol.messages.base import Role, SequenceId
from protocol.messages.worker import FromWorker, Ping

_FIRST = 1 << 40
"""Ids of sequences are like no other number, so that whoever remembers one is found."""
_BUSY_PING, _IDLE_PING = 2.0, 30.0
"""Seconds. The real loop always asks every 2 s; here idle time is to cost little."""
_KEPT = 40


@dataclass(slots=True)
class SimulatedClient:
    """One request, and what its client has of it."""

    request: Request
    reference: list[int]
    """All that target-only decoding says."""
    tokens: list[int] = field(default_factory=list)


class FaultSimulation:
    """Things happen by `agenda`; `trouble` and whoever else wants to puts them there."""

    def __init__(
        self, options: Options, build: Callable[[Role], ModelledWorker], source: random.Random, loading: float = 1.0
    ) -> None:
        """`build` makes a worker for a new life; `loading`: most seconds until it has loaded its model."""
        self.agenda = VirtualClock()
        self.counts: Counter[str] = Counter()
        self.last: deque[tuple[float, Event, list[Command]]] = deque(maxlen=_KEPT)
        self.clients: dict[SequenceId, SimulatedClient] = {}
        """Of live requests."""
        self.wire = Wire()
        self._options = options
        self._build = build
        self._source = source
        self._loading = loading
        self.sites: dict[int, WorkerHost] = {}
        """Workers of the present life of the orchestrator, by incarnation."""
        self._incarnations = 0
        self._epoch = 0
        self.begin()
        self.agenda.at(0.0, self._ping)

    @property
    def now(self) -> float:
        return self.agenda.now

    # The orchestrator -------------------------------------------------------------------------

    def begin(self) -> None:
        """A new life of the orchestrator; what clients and workers had of the old one is over."""
        self._epoch += 1
        self.counts["orchestrators"] += 1
        for site in self.sites.values():
            site.alive = False
        self.clients.clear()
        self._ended = []
        self.machine = Machine(self._options)
        self.invariants = Invariants(self.machine)
        self.sites = {}
        self._own: dict[Role, int] = {}
        """The present lives of the workers that the supervisor starts."""
        self.failed = False
        """The target is not started again."""
        self._policies: dict[Role, RestartPolicy] = {}
        self._deaths: dict[Role, deque[float]] = {}
        roles: list[Role] = ["target", "draft"] if self.machine.strategy.drafts else ["target"]
        if self._source.random() < 0.3:
            roles.append("prefill")
        for role in roles:
            self._policies[role] = RestartPolicy()
            self._deaths[role] = deque()
            self._start(role, 0.0)

    @property
    def guests(self) -> list[int]:
        """Drafts that came from elsewhere and are still there."""
        own = self._own.values()
        return [id for id, site in self.sites.items() if site.alive and id not in own]

    def run(self, until: float) -> None:
        """Let happen what is due before `until`."""
        while True:
            due = [at for at in (self.agenda.next_at, self.machine.deadline()) if at is not None]
            if not due or min(due) > until:
                self.agenda.now = max(self.now, until)
                return
            if self.agenda.next_at is not None and self.agenda.next_at <= min(due):
                self.agenda.advance()
            else:
                self.agenda.now = max(self.now, min(due))
                self._step(Tick())

    def check_empty(self) -> None:
        """All requests have ended, and the machine has forgotten them."""
        if self.clients:
            raise Violation(f"{len(self.clients)} requests are still live although nothing is in their way.")
        self.invariants.empty(self._ended)
        self._ended = []

    def _step(self, event: Event) -> None:
        self.counts["events"] += 1
        commands: list[Command] = []
        self.last.append((self.now, event, commands))
        commands += self.machine.step(event, self.now)
        for command in commands:
            self._perform(command)
        self.invariants.hold(self.now)

    def _perform(self, command: Command) -> None:
        client = self.clients.get(command.sequence) if isinstance(command, Emit | Finish | Reject) else None
        if client is None and isinstance(command, Emit | Finish | Reject):
            raise Violation(f"Something was said of a request that is over: {command}.")
        reference, before = (client.reference, len(client.tokens)) if client else (None, 0)
        self.invariants.performed(command, reference, before)
        match command:
            case SendMessage(role, message, incarnation):
                self.sites[incarnation or self._own[role]].tell(message)
            case Emit(sequence, tokens):
                self.clients[sequence].tokens += tokens
            case Finish(sequence):
                self.counts["finished"] += 1
                self.counts["tokens"] += before
                self._over(sequence)
            case Replace(role):
                self.counts["replaced"] += 1
                self.kill(role)
            case Dismiss(_, incarnation, _) if incarnation in self.guests:
                self.counts["dismissed"] += 1
                self.detach(incarnation)
            case Dismiss() | Reject():
                raise Violation(f"Nothing gives a reason for {command}.")

    # Clients ----------------------------------------------------------------------------------

    def submit(self, request: Request, reference: list[int]) -> SequenceId | None:
        """A client asks; None if the pipeline has failed."""
        if self.failed:
            return None
        self.counts["requests"] += 1
        id = SequenceId(_FIRST + self.counts["requests"])
        self.clients[id] = SimulatedClient(request, reference)
        self._step(Submitted(id, request))
        return id

    def cancel(self, sequence: SequenceId) -> None:
        """A client has had enough, if it still waits."""
        if sequence in self.clients:
            self.counts["cancelled"] += 1
            self._step(Ended(sequence, "cancelled"))

    def _over(self, sequence: SequenceId) -> None:
        del self.clients[sequence]
        self._ended.append(sequence)

    # Workers ----------------------------------------------------------------------------------

    def kill(self, role: Role) -> None:
        """A worker's process dies, whatever it was at. The restart policy says what follows."""
        incarnation = self._own.get(role)
        if incarnation is None or not self.sites[incarnation].alive:
            return
        self.counts[f"{role} killed"] += 1
        self._gone(role, incarnation)
        self._deaths[role].append(self.now)
        delay = self._policies[role].died(self.now)
        if delay is not None:
            self._start(role, delay)
        elif len([at for at in self._deaths[role] if at >= self.now - 60.0]) < 3:
            raise Violation(f"The {role} was given up after fewer than three deaths within a minute.")
        elif role == "target":
            self._fail()

    def attach(self) -> None:
        """A draft of another machine comes."""
        self.counts["attached"] += 1
        self._raise("draft", 0.0, guest=True)

    def detach(self, incarnation: int) -> None:
        """A guest goes, or its connection does, which is the same to us."""
        if incarnation in self.guests:
            self._gone("draft", incarnation)

    def freeze(self, incarnation: int, seconds: float) -> None:
        """A worker stops for so long, as by SIGSTOP."""
        site = self.sites[incarnation]
        self.counts["silent"] += site.alive
        site.freeze()
        self.agenda.at(self.now + seconds, site.thaw)

    def own(self, role: Role) -> int | None:
        """The present life of a worker that the supervisor starts, if there is one."""
        return self._own.get(role)

    def rewire(self, wire: Wire) -> None:
        """From now on messages travel so."""
        self.wire = wire
        for site in self.sites.values():
            site.rewire(wire)

    def given_up(self) -> bool:
        """A worker is not started again in this life of the orchestrator."""
        return any(len([at for at in deaths if at >= self.now - 60.0]) >= 3 for deaths in self._deaths.values())

    def _start(self, role: Role, delay: float) -> None:
        self._own[role] = self._raise(role, delay, guest=False)

    def _raise(self, role: Role, delay: float, guest: bool) -> int:
        """A new life, which may end before its model is loaded."""
        self._incarnations += 1
        epoch, incarnation = self._epoch, self._incarnations
        site = WorkerHost(
            self._build(role),
            self.agenda,
            self.wire,
            (self._source.getrandbits(32), incarnation),
            lambda message: self._hear(epoch, role, incarnation, message),
        )
        self.sites[incarnation] = site
        loading = delay + self._source.uniform(0.0, self._loading)
        self.agenda.at(self.now + loading, lambda: self._loaded(epoch, role, site, guest))
        return incarnation

    def _loaded(self, epoch: int, role: Role, site: WorkerHost, guest: bool) -> None:
        if epoch == self._epoch and site.alive:
            self.invariants.up.add((role, site.incarnation))
            self._step(WorkerUp(site.incarnation, site.worker.hello, guest))

    def _gone(self, role: Role, incarnation: int) -> None:
        self.sites[incarnation].alive = False
        if (role, incarnation) in self.invariants.up:
            self.invariants.up.remove((role, incarnation))
            self._step(WorkerDown(role, incarnation))

    def _hear(self, epoch: int, role: Role, incarnation: int, message: FromWorker) -> None:
        """Messages of dead workers still arrive; those of another epoch the loop drops."""
        if epoch == self._epoch:
            self._step(Arrived(role, incarnation, message))

    def _fail(self) -> None:
        """The circuit breaker is open: every client is told so."""
        self.counts["gave up"] += 1
        self.counts["refused"] += len(self.clients)
        self.failed = True
        for sequence in list(self.clients):
            self._over(sequence)

    def _ping(self) -> None:
        for _, incarnation in sorted(self.invariants.up):
            self.sites[incarnation].tell(Ping(self.now))
        self.agenda.at(self.now + (_BUSY_PING if self.clients else _IDLE_PING), self._ping)
