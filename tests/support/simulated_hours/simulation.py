"""Simulated hours of faults, drawn from a seed: requests, bad wires, crashes, frozen workers, garbage. Pure.

The workers restart by the real policy. The invariants are checked at every command and after every event. The same seed
gives the same events.
"""

import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.core.commands import Command, Dismiss, Finish, Pardon, Reject
from orchestrator.core.events import Event
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.lab.simulate.acceptance import AcceptanceModel, Language, ModelledLanguage, random_token
from orchestrator.lab.simulate.devices import Wires
from orchestrator.lab.simulate.worker_host import BuildWorker, SimulatedWorker
from orchestrator.lab.simulate.workers import ModelledDraft
from orchestrator.runtime.restarts import RestartPolicy
from protocol.messages.base import Level, RequestId, Role
from protocol.messages.features import FeatureForm
from protocol.messages.worker import Ping
from protocol.worker.pacing import DevicePace
from tests.support.recording_target import TAPS, RecordingTarget, reading
from tests.support.simulated_hours.faulty_workers import FaultyTarget, GarbageDraft, ModelledPrefill
from tests.support.simulated_hours.invariants import Invariants, Violation
from tests.support.simulation import Simulation, Wire

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
            case Reject() if self.counts["target killed"] > 1:
                self.counts["rejected"] += 1
            case Pardon():
                self._policies["target"].pardon()
                self._deaths["target"].clear()
            case Dismiss() | Reject():
                raise Violation(f"There is no reason for {command}.")
            case _:
                pass
        super().perform(command)

    def cancel(self, sequence: RequestId) -> None:
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


PERIOD = 300.0
"""Seconds from the start of one fault phase to the start of the next."""
_MAX_FAULT_PHASE = 60.0
QUIET_PHASE = 200.0
"""Seconds without faults in which every request must end: a silent target is detected after 60."""
_MAX_REMOTE_DRAFTS = 3
_TARGET = DevicePace(steps=((1, 0.020), (4, 0.024), (16, 0.040)), prefill_rate=1000.0)
_PREFILL = DevicePace(steps=((1, 0.01),), prefill_rate=2000.0)
_DRAFTS = [DevicePace(steps=((1, step), (8, 1.2 * step)), prefill_rate=2000.0) for step in (0.012, 0.03, 0.15)]
_LEVELS: tuple[Level, ...] = ("tree", "tree", "chain", "plain")
_FORMS = (None, FeatureForm((1, 4), TAPS.width), FeatureForm((-1, 4), TAPS.width))
"""Features that drafts read."""


@dataclass(slots=True)
class SimulatedHours:
    """The outcome of one seed."""

    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    violation: str = ""
    """The broken invariant; empty if all held."""
    last: list[str] = field(default_factory=list)
    """The events before the violation with their commands."""


class RepeatingLanguage(ModelledLanguage):
    """Every second passage repeats, so that prompt lookup finds guesses."""

    def token(self, request: int, position: int) -> int:
        repeats = (position // 24) % 2 == 1
        return random_token(self.seed, request, 0, 1 << 20 if repeats else position, position % 5 if repeats else 0)


def simulate_hours(seed: int, hours: float = 1.0) -> SimulatedHours:
    """Simulate `hours` hours of this seed."""
    outcome = SimulatedHours(seed)
    schedule = _FaultSchedule(seed)
    try:
        for number in range(max(1, round(hours * 3600 / PERIOD))):
            schedule.run_phases(number * PERIOD)
    except Exception as error:  # noqa: BLE001 - every error of the state machine is a finding
        outcome.violation = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
        outcome.last = [_line(at, event, commands) for at, event, commands in schedule.simulation.history]
    outcome.counts = schedule.simulation.counts
    return outcome


class _FaultSchedule:
    """Draws requests and faults. Each fault phase is followed by a quiet phase."""

    def __init__(self, seed: int) -> None:
        self._source = source = random.Random(f"hour {seed}")
        accept = source.choice((0.0, 0.3, 0.7, 0.95))
        shift = source.choice((0.0, 0.0, 20.0, -3.0))
        prompt = source.choice((2, 10, 60, 300))
        self._language = RepeatingLanguage(AcceptanceModel(accept=accept, claim_shift=shift), seed & 0xFFFF, prompt)
        self._requests = 0
        self._garbage = 0.0
        """Current share of messages that drafts damage."""
        self._faulty = 0.0
        """Current share of messages that the target answers with a fault."""
        loading = source.choice((0.001, 1.0, 5.0))
        self.simulation = FaultSimulation(self._options(), self._language, self._worker, source, loading)

    def run_phases(self, begin: float) -> None:
        """Faults and requests for up to a minute, then a quiet phase, in which all requests must end."""
        simulation, source = self.simulation, self._source
        simulation.run_until(begin)
        if simulation.failed or simulation.given_up():
            simulation.begin()
        length = source.uniform(1.0, _MAX_FAULT_PHASE)
        self._garbage = source.choice((0.0, 0.0, 0.1, 0.9))
        self._faulty = source.choice((0.0, 0.01, 0.1))
        simulation.rewire(self._bad_wire())
        for at in self._times(begin, length, source.choice((1, 2, 6))):
            simulation.clock.at(at, self._submit)
        for at in self._times(begin, length, source.choice((0, 1, 3, 8))):
            simulation.clock.at(at, self._fault)
        simulation.run_until(begin + length)
        self._garbage = self._faulty = 0.0
        simulation.rewire(Wire())
        simulation.run_until(begin + length + QUIET_PHASE)
        if not simulation.failed:
            simulation.invariants.empty()

    def _times(self, begin: float, length: float, count: int) -> Iterable[float]:
        """`count` times, about half of them within one second."""
        burst = begin + self._source.uniform(0.0, length)
        for _ in range(count):
            near = self._source.random() < 0.5
            at = burst + self._source.uniform(0.0, 1.0) if near else begin + self._source.uniform(0.0, length)
            yield min(at, begin + length)

    def _submit(self) -> None:
        simulation, source, self._requests = self.simulation, self._source, self._requests + 1
        number, most, ends = self._requests, source.choice((1, 3, 10, 30)), frozenset[int]()
        if source.random() < 0.3:
            first = len(self._language.prompt(number))
            ends = frozenset({self._language.token(number, first + source.randrange(most)), 1})
        temperature = source.choice((0.0, 1.0))
        if simulation.failed:
            return
        simulation.counts["requests"] += 1
        id = simulation.submit(number, most, temperature, ends=ends, prompt_logprobs=source.random() < 0.2)
        if source.random() < 0.2:
            simulation.clock.at(simulation.now + source.expovariate(2.0), lambda: simulation.cancel(id))

    def _fault(self) -> None:
        source, simulation = self._source, self.simulation
        role: Role = source.choice(("target", "draft", "draft", "prefill"))
        remote = source.choice(simulation.remote_drafts or [0])
        match source.choice(("crash", "crash", "freeze", "wire", "orchestrator", "attach", "detach")):
            case "crash":
                simulation.crash(role)
            case "freeze" if role in simulation.own:
                frozen = remote if role == "draft" and remote else simulation.own[role]
                simulation.freeze(frozen, source.choice((0.05, 1.0, 10.0, 90.0)))
            case "wire":
                simulation.rewire(self._bad_wire())
            case "attach" if len(simulation.remote_drafts) < _MAX_REMOTE_DRAFTS:
                simulation.attach_draft()
            case "detach":
                simulation.detach(remote)
            case _ if source.random() < 0.2:
                simulation.begin()
            case _:
                pass

    def _bad_wire(self) -> Wire:
        source = self._source
        return Wire(
            delay=source.choice((0.0001, 0.0001, 0.005, 0.05)),
            jitter=source.choice((0.0, 0.001, 0.1)),
            loss=source.choice((0.0, 0.01, 0.1)),
            resend=source.choice((0.2, None)),
            doubled=source.choice((0.0, 0.05)),
            overtaking=source.choice((0.0, 0.05)),
        )

    def _options(self) -> Options:
        source = self._source
        strategies = [*STRATEGIES, "adaptive", "adaptive", "adaptive"]
        return Options(
            strategy=source.choice(strategies),
            fallback=source.choice(("neural", "fast", "adaptive")),
            draft_tokens=source.choice((1, 4)),
            draft_width=source.choice((1, 4)),
            draft_fan=source.choice((1, 3)),
            fan_budget=source.choice((2, 6)),
            prefill=source.choice(("auto", "always")),
            arena_memory=source.choice((0, 64, 2048)),
            concurrent=source.choice((1, 2, 16)),
            turn=source.choice((8, 256)),
        )

    def _worker(self, role: Role) -> SimulatedWorker:
        if role == "target":
            target = RecordingTarget(self._language, _TARGET, level=self._source.choice(_LEVELS))
            return FaultyTarget(target, self._source, self._faulty)
        if role == "prefill":
            return ModelledPrefill(_PREFILL, self._source, share=0.1)
        draft = reading(ModelledDraft(self._language, self._source.choice(_DRAFTS)), self._source.choice(_FORMS))
        if self._garbage and self._source.random() < 0.7:
            return GarbageDraft(draft, self._source, self._garbage)
        return draft


def _line(at: float, event: object, commands: Iterable[object]) -> str:
    performed = "; ".join(_brief(command) for command in commands) or "nothing"
    return f"{at:.4f} s  {_brief(event)}\n    -> {performed}"


def _brief(thing: object) -> str:
    text = repr(thing)
    return text if len(text) <= 240 else f"{text[:200]} ... {text[-40:]}"
