"""A whole pipeline in virtual time: the real state machine, modelled workers, wires, outages. Pure.

The same arguments give the same run, event by event.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.core.commands import Command, Emit, Finish, Reject, Replace, SendMessage
from orchestrator.core.events import Arrived, Ended, Event, Request, Submitted, Tick, WorkerDown, WorkerUp
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.runtime.journal import Journal
from orchestrator.tools.simulate.devices import Devices, Wire, Wires
from orchestrator.tools.simulate.draft import ModelledDraft
from orchestrator.tools.simulate.language import Language
from orchestrator.tools.simulate.modelled_worker import ModelledWorker
from orchestrator.tools.simulate.target import ModelledTarget
from orchestrator.tools.simulate.virtual_clock import VirtualClock
from orchestrator.tools.simulate.worker_host import WorkerHost
from protocol.messages.base import Role, SequenceId
from protocol.messages.client import Statistics
from protocol.messages.sampling import Sampling
from protocol.worker.pacing import DevicePace

_CONTEXT = 1 << 17
_RESTART_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Outage:
    """A worker dies at `at` and another one is ready `seconds` later; all in seconds."""

    role: Role
    at: float
    seconds: float = _RESTART_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A draft of another machine, beside the pipeline's own or instead of it; times in seconds."""

    pace: DevicePace
    language: Language | None = None
    """Whose guesses it makes, where it is better or worse than the pipeline's own draft."""
    wire: Wire = field(default_factory=Wire)
    at: float = 0.0
    until: float = float("inf")
    """When it is detached."""
    silent_from: float = float("inf")
    """When it stops in the middle of whatever it does, which nobody is told."""


@dataclass(slots=True)
class Served:
    """What became of one request."""

    request: int
    tokens: list[int]
    statistics: Statistics | None = None
    """None until it is finished."""


class Simulation:
    """Submit requests, run, look at `served`."""

    def __init__(
        self,
        options: Options,
        language: Language,
        devices: Devices,
        wires: Wires | None = None,
        outages: Iterable[Outage] = (),
        seed: int = 0,
        journal: Journal | None = None,
        guests: Iterable[Guest] = (),
        draft: bool = True,
    ) -> None:
        """`draft`: the pipeline has one of its own.
        `seed`: of what the wires do to messages; `journal`: takes down what happens to the machine."""
        self.machine = Machine(options)
        self.served: dict[SequenceId, Served] = {}
        self._agenda = VirtualClock()
        self._language = language
        self._devices = devices
        self._wires = wires or Wires()
        self._seed = seed
        self._journal = journal or Journal(None)
        self._incarnations = 0
        self._sites: dict[int, WorkerHost] = {}
        self._own: dict[Role, int] = {}
        """Incarnations of the pipeline's own workers that were raised last."""
        self._unfinished = 0
        roles: tuple[Role, ...] = ("target", "draft") if draft and self.machine.strategy.drafts else ("target",)
        for role in roles:
            self._raise(role)
        for guest in guests:
            self._agenda.at(guest.at, lambda guest=guest: self._attach(guest))
        for outage in outages:
            self._agenda.at(outage.at, lambda outage=outage: self._fell(outage))

    @property
    def now(self) -> float:
        return self._agenda.now

    def submit(self, request: int, max_tokens: int, temperature: float = 0.0, at: float = 0.0) -> SequenceId:
        """Ask for a request of the language, `at` so many seconds after the beginning."""
        id = SequenceId(len(self.served) + 1)
        self.served[id] = Served(request, [])
        self._unfinished += 1
        sampling = Sampling(temperature=temperature, seed=request)
        event = Submitted(id, Request(self._language.prompt(request), sampling, max_tokens))
        self._agenda.at(at, lambda: self._step(event))
        return id

    def cancel(self, sequence: SequenceId, at: float) -> None:
        self._agenda.at(at, lambda: self._step(Ended(sequence, "cancelled")))

    def run(self, until: float = float("inf")) -> None:
        """Until every request is finished, or the clock would pass `until`."""
        while self._unfinished:
            due = [at for at in (self._agenda.next_at, self.machine.deadline()) if at is not None]
            assert due, "requests are unfinished and nothing will ever happen"
            if min(due) > until:
                return
            if self._agenda.next_at is not None and self._agenda.next_at <= min(due):
                self._agenda.advance()
            else:
                self._agenda.now = max(self.now, min(due))
                self._step(Tick())

    def truth(self, sequence: SequenceId) -> list[int]:
        """What the target alone would have said in place of this request's tokens."""
        served = self.served[sequence]
        first = len(self._language.prompt(served.request))
        return [self._language.token(served.request, first + index) for index in range(len(served.tokens))]

    def _step(self, event: Event) -> None:
        self._journal.write(event, self.now)
        for command in self.machine.step(event, self.now):
            self._perform(command)

    def _perform(self, command: Command) -> None:
        match command:
            case SendMessage(role, message, incarnation):
                self._sites[incarnation or self._own[role]].tell(message)
            case Emit(sequence, tokens):
                self.served[sequence].tokens += tokens
            case Finish(sequence, _, statistics):
                self.served[sequence].statistics = statistics
                self._unfinished -= 1
            case Reject(_, text):
                raise AssertionError(f"a modelled request was rejected: {text}")
            case Replace(role):
                self._fell(Outage(role, self.now))
            case _:
                raise AssertionError(f"modelled workers give no reason for {command}")

    def _raise(self, role: Role) -> None:
        """A new worker of the pipeline's own is ready."""
        wire = self._wires.target if role == "target" else self._wires.draft
        self._own[role] = self._incarnations + 1
        self._join(self._worker(role), wire)

    def _join(self, worker: ModelledWorker, wire: Wire, guest: bool = False) -> WorkerHost:
        self._incarnations += 1
        incarnation, role = self._incarnations, worker.hello.role
        site = WorkerHost(
            worker,
            self._agenda,
            wire,
            (self._seed, incarnation),
            lambda message: self._step(Arrived(role, incarnation, message)),
        )
        self._sites[incarnation] = site
        self._step(WorkerUp(incarnation, worker.hello, guest))
        return site

    def _attach(self, guest: Guest) -> None:
        site = self._join(ModelledDraft(guest.language or self._language, guest.pace, _CONTEXT), guest.wire, guest=True)
        for at, happen in ((guest.until, lambda: self._gone("draft", site)), (guest.silent_from, site.freeze)):
            if at < float("inf"):
                self._agenda.at(at, happen)

    def _fell(self, outage: Outage) -> None:
        site = self._sites.get(self._own.get(outage.role, 0))
        if site is not None and site.alive:
            self._gone(outage.role, site)
            self._agenda.at(self.now + outage.seconds, lambda: self._raise(outage.role))

    def _gone(self, role: Role, site: WorkerHost) -> None:
        site.alive = False
        self._step(WorkerDown(role, site.incarnation))

    def _worker(self, role: Role) -> ModelledWorker:
        devices = self._devices.shared() if self.machine.strategy.caches else self._devices
        if role == "target":
            return ModelledTarget(self._language, devices.target, _CONTEXT)
        return ModelledDraft(self._language, devices.draft, _CONTEXT)
