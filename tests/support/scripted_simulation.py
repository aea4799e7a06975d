"""A pipeline in virtual time that a test drives event by event, and whose messages it may hold back."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from orchestrator.core.commands import Command, SendMessage
from orchestrator.core.events import Arrived, Event
from orchestrator.core.options import Options
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.devices import Devices
from orchestrator.lab.simulate.worker_host import BuildWorker
from orchestrator.lab.simulate.workers import modelled_workers
from protocol.messages.base import NodeId, RequestId, Role
from protocol.messages.client import Statistics
from protocol.messages.worker import Forest, FromWorker, ToWorker, Verdict, Verify
from protocol.speculation.token_tree import Candidates
from protocol.worker.pacing import DevicePace
from tests.support.simulation import Simulation

ONE, TWO, THREE = RequestId(1), RequestId(2), RequestId(3)
CONTEXT = 400
LANGUAGE = ModelledLanguage(AcceptanceModel(accept=0.7), seed=1, prompt_tokens=3)
TARGET = DevicePace(steps=((1, 0.011), (17, 0.027)), prefill_rate=1000.0)
DRAFT = DevicePace(steps=((1, 0.004),), prefill_rate=4000.0)
DEVICES = Devices(target=TARGET, draft=DRAFT, baseline_draft=DRAFT)

Kind = TypeVar("Kind")


class ScriptedSimulation(Simulation):
    """Workers are started by the test. The first request is sequence 1."""

    def __init__(self, options: Options | None = None, build: BuildWorker | None = None) -> None:
        workers = build or modelled_workers(LANGUAGE, DEVICES, CONTEXT)
        super().__init__(options or Options(), LANGUAGE, workers, kept=None)
        self.holds: Callable[[ToWorker | FromWorker], bool] = lambda message: False
        """Which messages do not arrive."""
        self._held: list[Callable[[], None]] = []

    def send(self, incarnation: int, message: ToWorker) -> None:
        deliver = super().send
        if self.holds(message):
            self._held.append(lambda: deliver(incarnation, message))
        else:
            deliver(incarnation, message)

    def receive(self, role: Role, incarnation: int, message: FromWorker) -> None:
        deliver = super().receive
        if self.holds(message):
            self._held.append(lambda: deliver(role, incarnation, message))
        else:
            deliver(role, incarnation, message)

    def release(self) -> None:
        """What was held back arrives."""
        self.holds = lambda message: False
        held, self._held = self._held, []
        for deliver in held:
            deliver()

    def run_events(self, count: int) -> None:
        """So many events, or until nothing is due."""
        end = len(self.history) + count
        while len(self.history) < end and self.advance():
            pass

    def run_while(self, condition: Callable[[], bool]) -> None:
        while condition():
            assert self.advance(), "nothing is due"

    def settle(self) -> None:
        """Until nothing is due."""
        while self.advance():
            pass

    def statistics(self, sequence: RequestId = ONE) -> Statistics:
        """Of a request that has ended."""
        statistics = self.clients[sequence].statistics
        assert statistics is not None
        return statistics

    @property
    def commands(self) -> list[Command]:
        return [command for _, _, commands in self.history for command in commands]

    def trees(self) -> list[Verify]:
        """All trees that the target was sent, in order."""
        sent = [message for message in self.sent(object) if isinstance(message, Verify | Forest)]
        return [tree for message in sent for tree in (message.trees if isinstance(message, Forest) else (message,))]

    def sent(self, kind: type[Kind], incarnation: int | None = None) -> list[Kind]:
        """Messages to workers, perhaps to one of them."""
        sent = [command for command in self.commands if isinstance(command, SendMessage)]
        return [
            command.message
            for command in sent
            if isinstance(command.message, kind)
            and incarnation in (None, self.own[command.role] if command.incarnation is None else command.incarnation)
        ]


def ready(strategy: str = "adaptive", build: BuildWorker | None = None, **options) -> ScriptedSimulation:
    """A target and a draft are up, in this order."""
    simulation = ScriptedSimulation(Options(strategy=strategy, **options), build)
    simulation.start("target")
    simulation.start("draft")
    return simulation


class FixedPrompts:
    """A `Language` of prompts alone: real workers decide everything else."""

    def __init__(self, prompts: Sequence[tuple[int, ...]]) -> None:
        self._prompts = prompts

    def prompt(self, request: int) -> tuple[int, ...]:
        return self._prompts[request]

    def token(self, request: int, position: int) -> int:
        return 0

    def candidates(self, request: int, node: NodeId, position: int, on_target_path: bool, limit: int) -> Candidates:
        raise AssertionError("a real draft makes the guesses")


def rounds(simulation: Simulation) -> list[tuple[int, int, int]]:
    """The rounds in order: sequence, accepted tokens, bonus token. The simulation keeps its whole history."""
    events: list[Event] = [event for _, event, _ in simulation.history]
    verdicts = [event.message for event in events if isinstance(event, Arrived) and isinstance(event.message, Verdict)]
    return [(verdict.request, len(verdict.path), verdict.bonus) for verdict in verdicts]
