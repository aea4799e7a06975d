"""The laboratory's simulation with what can go wrong: wires that lose, double and reorder messages, workers that
freeze, die, load for a while and come from other machines; and requests of every form.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.core.commands import Command, Dismiss, Reject, Replace
from orchestrator.core.events import Ended, Event, Task, WorkerDown
from orchestrator.core.options import Options
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.lab.simulate import devices, simulation, worker_host
from orchestrator.lab.simulate.acceptance import Language, uniform
from orchestrator.lab.simulate.devices import Devices, Wires
from orchestrator.lab.simulate.worker_host import BuildWorker, Contention, SimulatedWorker, VirtualClock, Work
from orchestrator.lab.simulate.workers import modelled_workers
from protocol.messages.base import Level, RequestId, Role
from protocol.messages.sampling import Sampling

_RESTART_SECONDS = 1.0
"""Until the successor of a replaced worker is up."""
_RETRY_SECONDS = 1.0
"""Interval at which a frozen host checks whether it may finish a unit of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire(devices.Wire):
    """It keeps the order, except for `overtaking` messages."""

    jitter: float = 0.0
    """Maximum of an additional, uniformly distributed delay in seconds."""
    loss: float = 0.0
    """Share of messages that are lost at first."""
    resend: float | None = 0.2
    """Seconds until a lost message is sent again, as by TCP; None: it is not sent again."""
    doubled: float = 0.0
    """Share of messages that arrive twice, the second time late."""
    overtaking: float = 0.0
    """Share of messages that may overtake earlier ones, as after a reconnection."""


class WireDirection(worker_host.WireDirection):
    """Its key seeds its faults. Messages under way keep their arrival times if the wire is replaced."""

    def __init__(self, clock: VirtualClock, wire: devices.Wire, *key: int) -> None:
        super().__init__(clock, wire, *key)
        self._sent = 0

    def send(self, at: float, deliver: Callable[[], None]) -> None:
        """Deliver a message that is sent at `at`, unless the wire loses it."""
        wire = self.wire
        if not isinstance(wire, Wire):
            super().send(at, deliver)
            return
        arrival = at + wire.delay + wire.jitter * self._chance(wire, 0)
        doubled, overtaking = self._chance(wire, -1) < wire.doubled, self._chance(wire, -2) < wire.overtaking
        tries = 1
        while self._chance(wire, tries) < wire.loss:
            if wire.resend is None:
                self._sent += 1
                return
            arrival += wire.resend
            tries += 1
        self._sent += 1
        if not overtaking:
            arrival = self._clear_at = max(self._clear_at, arrival)
        self._clock.at(arrival, deliver)
        if doubled:
            self._clock.at(arrival + 20 * wire.delay, deliver)

    def _chance(self, wire: Wire, purpose: int) -> float:
        certain = not (wire.jitter or wire.loss or wire.doubled or wire.overtaking)
        return 1.0 if certain else uniform(*self._key, self._sent, purpose)


class WorkerHost(worker_host.WorkerHost):
    direction = WireDirection
    _frozen = False

    def rewire(self, wire: Wire) -> None:
        """Send later messages over another wire."""
        self._outbound.wire = self._inbound.wire = wire

    def freeze(self) -> None:
        """Stop in the middle of a unit of work; messages queue up."""
        self._frozen = True

    def thaw(self) -> None:
        """Continue where it stopped."""
        self._frozen = False
        self._continue()

    def _continue(self) -> None:
        if not self._frozen:
            super()._continue()

    def _done(self, work: Work) -> None:
        if self._frozen and self.alive:
            self._clock.at(self._clock.now + _RETRY_SECONDS, lambda: self._done(work))
        else:
            super()._done(work)


class Simulation(simulation.Simulation):
    host = WorkerHost
    hosts: dict[int, WorkerHost]  # pyright: ignore[reportIncompatibleVariableOverride]

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
        """`seed` decides the wires' faults; `kept`: number of the last events in `history`, None for all."""
        super().__init__(options, language, build, wires, seed, slow_down)
        self.history: deque[tuple[float, Event, list[Command]]] = deque(maxlen=kept)

    def step(self, event: Event) -> list[Command]:
        commands: list[Command] = []
        self.history.append((self.now, event, commands))
        commands += super().step(event)
        return commands

    def run_until(self, time: float) -> None:
        """Process all events up to `time`."""
        while (at := self.next_at) is not None and at <= time:
            self.advance()
        self.clock.now = max(self.now, time)

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
        return self.submit_task(Task(tokens, sampling, max_tokens, ends, background=background, seeded=seeded))

    def cancel(self, sequence: RequestId) -> None:
        self.step(Ended(sequence, "cancelled"))

    def start(self, role: Role, loading: float = 0.0) -> WorkerHost:
        """Start a life of the pipeline's own worker, which loads its model for `loading` seconds."""
        host = self.add_host(self.build(role), contention=self._contention)
        self.own[role] = host.incarnation
        self._load(host, loading, remote=False)
        return host

    def add_host(
        self, worker: SimulatedWorker, wire: devices.Wire | None = None, contention: Contention | None = None
    ) -> WorkerHost:
        host = super().add_host(worker, wire, contention)
        assert isinstance(host, WorkerHost)
        return host

    def attach(self, draft: SimulatedWorker, loading: float = 0.0, wire: devices.Wire | None = None) -> WorkerHost:
        """Start a draft of another machine."""
        host = self.add_host(draft, wire)
        self._load(host, loading, remote=True)
        return host

    def _load(self, host: WorkerHost, seconds: float, *, remote: bool) -> None:
        if seconds > 0.0:
            self.clock.at(self.now + seconds, lambda: self.loaded(host, remote=remote))
        else:
            self.loaded(host, remote=remote)

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

    def perform(self, command: Command) -> None:
        super().perform(command)
        match command:
            case Reject(sequence, text):
                self.end(sequence, text)
            case Replace(role):
                self.replace(role)
            case Dismiss(_, incarnation):
                self.remove(incarnation)
            case _:
                pass


def modelled_pipeline(
    options: Options,
    language: Language,
    devices: Devices,
    wires: Wires | None = None,
    seed: int = 0,
    kept: int | None = 0,
    level: Level = "tree",
) -> Simulation:
    """A pipeline whose target, of this level, is up; its draft too, if the strategy uses one."""
    build = modelled_workers(language, devices, level=level)
    simulation = Simulation(options, language, build, wires, seed, kept, devices.slow_down)
    simulation.start("target")
    if STRATEGIES[options.strategy].drafts:
        simulation.start("draft")
    return simulation
