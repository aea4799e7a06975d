"""A simulated pipeline whose workers crash, freeze and load slowly, with the real restart policy. Pure.

The invariants are checked at every command and after every event.
"""

import random
from collections import Counter, deque

from orchestrator.core.commands import Command, Dismiss, Finish, Reject
from orchestrator.core.events import Event
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.core.workers import RestartPolicy
from orchestrator.lab.simulate.devices import Wire, Wires
from orchestrator.lab.simulate.faults.invariants import Invariants, Violation
from orchestrator.lab.simulate.language import Language
from orchestrator.lab.simulate.simulation import Simulation
from orchestrator.lab.simulate.worker_host import BuildWorker
from protocol.messages.base import Role, SequenceId
from protocol.messages.worker import Ping

_BUSY_PING, _IDLE_PING = 2.0, 30.0
"""Seconds. The real loop pings every 2 s; here pings are rare when idle, to save time."""
_KEPT_EVENTS = 40
_WINDOW, _DEATHS = 60.0, 3
"""Seconds, and deaths within them, after which a worker may be given up."""


class FaultSimulation(Simulation):
    """One life of the orchestrator after another."""

    first_sequence = 1 << 40
    """Unlike all other numbers, so that a machine that still holds an ended request is detected."""

    def __init__(
        self, options: Options, language: Language, build: BuildWorker, source: random.Random, loading: float = 1.0
    ) -> None:
        """`loading`: maximum of seconds until a worker is up."""
        super().__init__(options, language, build, seed=source.getrandbits(32), kept=_KEPT_EVENTS)
        self.counts: Counter[str] = Counter()
        self._source = source
        self._loading = loading
        self.begin()
        self.clock.at(0.0, self._ping)

    # The orchestrator -------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a new life of the orchestrator, without the workers and clients of the last one."""
        self.counts["orchestrators"] += 1
        for host in self.hosts.values():
            host.alive = False
        for former in (self.hosts, self.own, self.clients, self.live):
            former.clear()
        self.machine = Machine(self.options)
        self.invariants = Invariants(self)
        self.failed = False
        """The target was given up."""
        self._deaths: dict[Role, deque[float]] = {}
        self._policies: dict[Role, RestartPolicy] = {}
        roles: list[Role] = ["target", "draft"] if self.machine.strategy.drafts else ["target"]
        if self._source.random() < 0.3:
            roles.append("prefill")
        for role in roles:
            self._deaths[role] = deque()
            self._policies[role] = RestartPolicy()
            self.start(role, self._loading_seconds())

    def step(self, event: Event) -> list[Command]:
        self.counts["events"] += 1
        commands = super().step(event)
        self.invariants.hold()
        return commands

    def perform(self, command: Command) -> None:
        self.invariants.allow(command)
        match command:
            case Finish(sequence):
                self.counts["finished"] += 1
                self.counts["tokens"] += len(self.clients[sequence].tokens)
            case Dismiss(_, incarnation) if incarnation in self.remote_drafts:
                self.counts["dismissed"] += 1
            case Dismiss() | Reject():
                raise Violation(f"There is no reason for {command}.")
            case _:
                pass
        super().perform(command)

    def cancel(self, sequence: SequenceId) -> None:
        """Cancel a request if it is live."""
        if sequence in self.live:
            self.counts["cancelled"] += 1
            super().cancel(sequence)

    # Workers ----------------------------------------------------------------------------------

    @property
    def remote_drafts(self) -> list[int]:
        """Incarnations of the drafts of other machines."""
        return [incarnation for incarnation in self.hosts if incarnation not in self.own.values()]

    def crash(self, role: Role) -> None:
        """Kill a worker's process; the restart policy decides whether and when another one starts."""
        if not self.kill(role):
            return
        self.counts[f"{role} killed"] += 1
        self._deaths[role].append(self.now)
        delay = self._policies[role].died(self.now)
        if delay is not None:
            self.start(role, delay + self._loading_seconds())
        elif not self._dies_often(role):
            raise Violation(f"The {role} was given up after fewer than {_DEATHS} deaths within a minute.")
        elif role == "target":
            self._fail()

    def replace(self, role: Role) -> None:
        self.counts["replaced"] += 1
        self.crash(role)

    def attach_draft(self) -> None:
        """Start a draft of another machine."""
        self.counts["attached"] += 1
        self.attach(self.build("draft"), self._loading_seconds())

    def detach(self, incarnation: int) -> None:
        """End a draft of another machine or its connection."""
        if incarnation in self.remote_drafts:
            self.remove(incarnation)

    def freeze(self, incarnation: int, seconds: float) -> None:
        """Stop a worker for `seconds`, as by SIGSTOP."""
        host = self.hosts.get(incarnation)
        if host is not None:
            self.counts["silent"] += 1
            host.freeze()
            self.clock.at(self.now + seconds, host.thaw)

    def rewire(self, wire: Wire) -> None:
        """Send all later messages over such wires."""
        self.wires = Wires(wire, wire)
        for host in self.hosts.values():
            host.rewire(wire)

    def given_up(self) -> bool:
        """Whether a worker was given up in this life of the orchestrator."""
        return any(self._dies_often(role) for role in self._deaths)

    def _dies_often(self, role: Role) -> bool:
        return sum(at >= self.now - _WINDOW for at in self._deaths[role]) >= _DEATHS

    def _loading_seconds(self) -> float:
        return self._source.uniform(0.0, self._loading)

    def _fail(self) -> None:
        """The circuit breaker is open: all live requests are refused."""
        self.counts["gave up"] += 1
        self.counts["refused"] += len(self.live)
        self.failed = True
        self.live.clear()

    def _ping(self) -> None:
        for host in list(self.hosts.values()):
            if host.is_up:
                host.send(Ping(self.now))
        self.clock.at(self.now + (_BUSY_PING if self.live else _IDLE_PING), self._ping)
