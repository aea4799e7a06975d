"""Whatever order events come in, whatever is lost, doubled or killed: the tokens are the target's own."""

import random
from collections.abc import Callable
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.core.commands import Command, Emit, Finish
from orchestrator.core.events import Tick
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.core.phases import Phase
from orchestrator.core.policy.estimates import Freshness
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.simulation import Simulation
from orchestrator.lab.simulate.worker_host import SimulatedWorker, Work, WorkerHost
from orchestrator.lab.simulate.workers import ModelledDraft
from orchestrator.runtime.recording import Journal, replay
from protocol.messages.base import Level, Role, SequenceId
from protocol.messages.features import FeatureForm
from protocol.messages.worker import ToWorker
from tests.support.recording_target import TAPS, RecordingTarget, reading
from tests.support.scripted_simulation import DRAFT, TARGET, ready

ROLES: list[Role] = ["target", "draft"]
FATES = ["delivered"] * 6 + ["out of order", "lost", "doubled"]
FORMS = [None, FeatureForm((1, 4), TAPS.width), FeatureForm((-1, 4), TAPS.width)]
"""Features that drafts read."""
THEN = st.tuples(st.integers(0, 60), st.integers(0, 1 << 16))
"""How many messages travel after an event, and the seed of what becomes of them."""


@pytest.fixture(autouse=True)
def hits_are_given_up_often(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Freshness, "_TERMS", replace(Freshness._TERMS, first_pause=2, longest_pause=2))


class DisorderedSimulation(Simulation):
    """Messages wait in a bag until the test says what becomes of them; workers work when the bag is empty.

    `levels`: of the targets, which fail at a tree that does not fit.
    """

    def __init__(self, options: Options, accept: float, prompt_tokens: int, levels: tuple[Level, ...]) -> None:
        self._acceptance, self._prompt_tokens, self._levels = AcceptanceModel(accept=accept), prompt_tokens, levels
        super().__init__(options, self._language(0), self._worker, kept=None)
        self.bag: list[Callable[[], None]] = []
        """Each delivers one message."""

    def _language(self, draft: int) -> ModelledLanguage:
        """Drafts are wrong at different positions."""
        return ModelledLanguage(self._acceptance, prompt_tokens=self._prompt_tokens, draft=(draft,))

    def _worker(self, role: Role) -> SimulatedWorker:
        language = self._language(len(self.history))
        level = self._levels[len(self.history) % len(self._levels)]
        if role == "target":
            return RecordingTarget(language, TARGET, level=level)
        return reading(ModelledDraft(language, DRAFT), FORMS[len(self.history) % len(FORMS)])

    def living(self, role: Role) -> list[int]:
        return [incarnation for incarnation, host in self.hosts.items() if host.role == role]

    def replace(self, role: Role) -> None:
        self.kill(role)

    def perform(self, command: Command) -> None:
        if isinstance(command, Emit | Finish):
            assert command.sequence in self.live
        super().perform(command)

    def send(self, incarnation: int, message: ToWorker) -> None:
        host = self.hosts[incarnation]
        self.bag.append(lambda: self._reply(host, host.worker.handle(message)) if host.alive else None)

    def _reply(self, host: WorkerHost, work: Work) -> None:
        self.clock.now += work.seconds
        for reply in work.replies:
            self.bag.append(lambda reply=reply: self.receive(host.role, host.incarnation, reply))

    def travel(self, fate: str, pick: int) -> bool:
        """The next message, or another one, arrives or does not; False if there is none and no worker has work."""
        if not self.bag:
            return self._work()
        deliver = self.bag.pop(pick % len(self.bag) if fate == "out of order" else 0)
        if fate == "doubled":
            self.bag.append(deliver)
        if fate != "lost":
            deliver()
        return True

    def _work(self) -> bool:
        """One unit by each worker that has any."""
        work = [(host, host.worker.work()) for host in list(self.hosts.values())]
        for host, done in work:
            if done is not None:
                self._reply(host, done)
        return any(done is not None for _, done in work)

    def tick(self, at: float) -> None:
        self.clock.now = max(self.now, at)
        self.step(Tick())


class Disorder(RuleBasedStateMachine):
    """The rules let messages travel and time pass, and start and kill workers."""

    @initialize(
        strategy=st.sampled_from([*STRATEGIES]),
        accept=st.sampled_from([0.1, 0.5, 0.8, 1.0]),
        prompt_tokens=st.sampled_from([1, 3]),
        drafts=st.sampled_from([1, 1, 3]),
        concurrent=st.sampled_from([1, 2, 16]),
        levels=st.sampled_from([("tree",), ("chain",), ("tree", "chain", "plain")]),
    )
    def begin(self, strategy, accept, prompt_tokens, drafts, concurrent, levels):
        options = Options(strategy=strategy, concurrent=concurrent, turn=7)
        self.simulation = DisorderedSimulation(options, accept, prompt_tokens, levels)
        self.machine = self.simulation.machine
        self.most: dict[Role, int] = {"target": 1, "draft": drafts}
        self.start_missing(ROLES)

    @rule(max_tokens=st.integers(1, 25), number=st.integers(0, 5), temperature=st.sampled_from([0.0, 1.0]), then=THEN)
    def submit(self, max_tokens, number, temperature, then):
        self.simulation.submit(number, max_tokens, temperature)
        self.travel(*then)

    @rule(roles=st.sampled_from([["target"], ["draft"]]), then=THEN)
    def start_worker(self, roles, then):
        self.start_missing(roles)
        self.travel(*then)

    def start_missing(self, roles):
        for role in roles:
            if len(self.simulation.living(role)) < self.most[role]:
                self.simulation.start(role)

    @precondition(lambda self: self.simulation.hosts)
    @rule(data=st.data(), restarted=st.booleans(), then=THEN)
    def kill_one(self, data, restarted, then):
        self.simulation.remove(data.draw(st.sampled_from(sorted(self.simulation.hosts))))
        self.start_missing(ROLES if restarted else [])
        self.travel(*then)

    @rule(seconds=st.sampled_from([0.001, 0.01, 0.3, 6.0]), then=THEN)
    def time_passes(self, seconds, then):
        self.simulation.tick(self.simulation.now + seconds)
        self.travel(*then)

    @precondition(lambda self: self.simulation.clients)
    @rule(data=st.data(), then=THEN)
    def cancel(self, data, then):
        self.simulation.cancel(SequenceId(data.draw(st.sampled_from(sorted(self.simulation.clients)))))
        self.travel(*then)

    def travel(self, messages, seed):
        source = random.Random(seed)
        for _ in range(messages):
            self.simulation.travel(source.choice(FATES), source.randrange(16))
            self.tick_if_due()

    def tick_if_due(self) -> bool:
        deadline = self.machine.deadline()
        if deadline is None or deadline > self.simulation.now:
            return False
        self.simulation.tick(deadline)
        return True

    @invariant()
    def emitted_tokens_begin_the_reference(self):
        if hasattr(self, "simulation"):
            for client in self.simulation.clients.values():
                assert client.tokens == client.reference[: len(client.tokens)]

    @invariant()
    def only_what_was_asked_is_under_verification(self):
        if hasattr(self, "simulation"):
            phases = {id: sequence.phase for id, sequence in self.machine.sequences.items()}
            assert all(phases[id] is Phase.VERIFYING for id in self.machine.scheduler.under_verification)

    @invariant()
    def no_more_requests_than_places_are_decoded_and_none_waits_for_a_free_one(self):
        if hasattr(self, "simulation"):
            queued = [one for one in self.machine.sequences.values() if one.phase is Phase.WAITING]
            served = len(self.machine.sequences) - len(queued)
            assert served == min(len(self.machine.sequences), self.simulation.options.concurrent)

    @invariant()
    def one_draft_drafts(self):
        if hasattr(self, "simulation"):
            statuses = self.machine.drafts.statuses()
            assert set(statuses) == set(self.simulation.living("draft"))
            assert list(statuses.values()).count("active") == min(1, len(statuses))
            assert list(statuses.values()).count("on trial") <= 1

    @invariant()
    def what_is_owed_has_a_deadline(self):
        if hasattr(self, "simulation") and self.simulation.living("target") and self.machine.sequences:
            assert self.machine.deadline() is not None

    def teardown(self):
        if not hasattr(self, "simulation"):
            return
        self.settle()
        for client in self.simulation.clients.values():
            blamed = client.reason is not None and client.reason.startswith("Two targets ended")
            assert blamed or client.reason == "cancelled" or client.tokens == client.reference
        machine = Machine(self.simulation.options)
        assert all(machine.step(event, now) == commands for now, event, commands in self.simulation.history)

    def settle(self) -> None:
        """Bring both workers up and let everything be heard in order; all requests must end."""
        simulation = self.simulation
        simulation.bag.clear()
        for _ in range(20_000):
            if not self.machine.sequences:
                return
            self.start_missing(ROLES)
            if not self.tick_if_due() and not simulation.travel("delivered", 0):
                simulation.tick(self.machine.deadline() or 0.0)
        raise AssertionError(f"{len(self.machine.sequences)} requests never ended")


class TestDisorder(Disorder.TestCase):
    settings = settings(max_examples=40, stateful_step_count=30, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestMoreDisorder(Disorder.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=40)


def test_a_recorded_log_replays_to_the_same_commands(tmp_path):
    simulation = ready("adaptive")
    simulation.submit(2, 40, temperature=1.0)
    simulation.run()
    journal = Journal(str(tmp_path / "events"))
    for now, event, _ in simulation.history:
        journal.write(event, now)
    journal.close()

    machine = Machine(simulation.options)
    commands = [machine.step(event, now) for event, now in replay(tmp_path / "events")]
    assert commands == [commands for *_, commands in simulation.history]
