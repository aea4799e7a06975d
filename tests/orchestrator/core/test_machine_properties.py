"""Whatever order events come in, whatever is lost, doubled or killed: the tokens are the target's own."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.core.commands import Command, Emit, Finish, Replace, SendMessage
from orchestrator.core.events import Arrived, Ended, Event, Request, Submitted, Tick, WorkerDown, WorkerUp
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.core.phases import Phase
from orchestrator.runtime.journal import Journal, replay
from protocol.messages.base import Role, SequenceId
from protocol.messages.sampling import Sampling
from protocol.messages.worker import FromWorker, ToWorker
from tests.support.simulated_workers import SimulatedDraft, SimulatedTarget, hello, reference

ROLES: list[Role] = ["target", "draft"]
PROMPT = (3, 1, 4)


class Disorder(RuleBasedStateMachine):
    """Messages wait in a bag in each direction; the rules deliver, lose and double them, and kill workers."""

    @initialize(
        strategy=st.sampled_from(["ar", "sd", "ssd", "adaptive"]),
        errs=st.integers(1, 5),
        drafts=st.sampled_from([1, 1, 3]),
        concurrent=st.sampled_from([1, 2, 16]),
    )
    def begin(self, strategy, errs, drafts=1, concurrent=16):
        self.options = Options(strategy=strategy, concurrent=concurrent, turn=7)
        self.machine = Machine(self.options)
        self.errs = errs
        self.most: dict[Role, int] = {"target": 1, "draft": drafts}
        self.workers: dict[int, SimulatedTarget | SimulatedDraft] = {}
        self.incarnation = 0
        self.alive: dict[int, Role] = {}
        """By incarnation."""
        self.inbox: list[tuple[Role, int, ToWorker]] = []
        self.outbox: list[tuple[Role, int, FromWorker]] = []
        self.now = 0.0
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, str] = {}
        self.history: list[tuple[Event, float, list[Command]]] = []

    def step(self, event: Event) -> None:
        commands = self.machine.step(event, self.now)
        self.history.append((event, self.now, commands))
        for command in commands:
            self.perform(command)

    def perform(self, command: Command) -> None:
        match command:
            case SendMessage(role, message, incarnation):
                to = incarnation or self.living(role)[0]
                assert self.alive[to] == role
                self.inbox.append((role, to, message))
            case Emit(sequence, tokens):
                assert sequence not in self.finished
                self.tokens[sequence].extend(tokens)
            case Finish(sequence, reason, _):
                assert sequence not in self.finished
                self.finished[sequence] = reason
            case Replace(_, incarnation, _):
                self.kill(incarnation)

    def living(self, role: Role) -> list[int]:
        return [incarnation for incarnation, of in self.alive.items() if of == role]

    @rule(max_tokens=st.integers(1, 25), seed=st.integers(0, 5), temperature=st.sampled_from([0.0, 1.0]))
    def submit(self, max_tokens, seed, temperature):
        id = len(self.requests) + 1
        sampling = Sampling(seed=seed, temperature=temperature)
        self.requests[id] = Request(PROMPT, sampling, max_tokens)
        self.tokens[id] = []
        self.step(Submitted(SequenceId(id), self.requests[id]))

    @rule(role=st.sampled_from(ROLES))
    def start_worker(self, role):
        if len(self.living(role)) < self.most[role]:
            self.incarnation += 1
            self.alive[self.incarnation] = role
            draft = SimulatedDraft(1 + (self.errs + self.incarnation) % 5)
            self.workers[self.incarnation] = SimulatedTarget() if role == "target" else draft
            self.step(WorkerUp(self.incarnation, hello(role)))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def kill_one(self, data):
        self.kill(data.draw(st.sampled_from(sorted(self.alive))))

    def kill(self, incarnation: int) -> None:
        self.step(WorkerDown(self.alive.pop(incarnation), incarnation))

    @precondition(lambda self: self.inbox)
    @rule(data=st.data(), fate=st.sampled_from(["deliver", "deliver", "deliver", "lose", "double"]))
    def worker_hears(self, data, fate):
        index = data.draw(st.integers(0, len(self.inbox) - 1))
        role, incarnation, message = self.inbox[index] if fate == "double" else self.inbox.pop(index)
        if fate != "lose" and incarnation in self.alive:
            replies = self.workers[incarnation].handle(message)
            self.outbox.extend((role, incarnation, reply) for reply in replies)

    @precondition(lambda self: self.outbox)
    @rule(data=st.data(), fate=st.sampled_from(["deliver", "deliver", "deliver", "lose", "double"]))
    def orchestrator_hears(self, data, fate):
        index = data.draw(st.integers(0, len(self.outbox) - 1))
        role, incarnation, message = self.outbox[index] if fate == "double" else self.outbox.pop(index)
        if fate != "lose":
            self.step(Arrived(role, incarnation, message))

    @rule(seconds=st.sampled_from([0.001, 0.01, 0.3, 6.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.step(Tick())

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        self.step(Ended(SequenceId(data.draw(st.sampled_from(sorted(self.requests)))), "cancelled"))

    @invariant()
    def emitted_tokens_begin_the_reference(self):
        for id, tokens in getattr(self, "tokens", {}).items():
            request = self.requests[id]
            assert tokens == reference(PROMPT, request.max_tokens, request.sampling.seed)[: len(tokens)]

    @invariant()
    def only_what_was_asked_is_under_verification(self):
        if hasattr(self, "machine"):
            phases = {id: sequence.phase for id, sequence in self.machine.sequences.items()}
            assert all(phases[id] is Phase.VERIFYING for id in self.machine.under_verification)

    @invariant()
    def no_more_requests_than_places_are_decoded_and_nobody_waits_for_a_free_one(self):
        if hasattr(self, "machine"):
            queued = [one for one in self.machine.sequences.values() if one.phase is Phase.WAITING]
            served = len(self.machine.sequences) - len(queued)
            assert served == min(len(self.machine.sequences), self.options.concurrent)

    @invariant()
    def one_draft_drafts(self):
        if hasattr(self, "machine"):
            standings = self.machine.draft_statuses()
            assert set(standings) == set(self.living("draft"))
            assert list(standings.values()).count("active") == min(1, len(standings))
            assert list(standings.values()).count("on trial") <= 1

    @invariant()
    def what_is_owed_has_a_deadline(self):
        if hasattr(self, "machine") and self.living("target") and self.machine.sequences:
            assert self.machine.deadline() is not None

    def teardown(self):
        if not hasattr(self, "machine"):
            return
        self.settle()
        for id, request in self.requests.items():
            expected = reference(PROMPT, request.max_tokens, request.sampling.seed)
            assert self.finished[id] == "cancelled" or self.tokens[id] == expected
        self.check_replay()

    def settle(self) -> None:
        """Bring both workers up and let everything be heard in order; all requests must end."""
        self.inbox.clear()
        self.outbox.clear()
        for role in ROLES:
            self.start_worker(role)
        for _ in range(5000):
            if not self.machine.sequences:
                return
            self.hear_in_order()
        raise AssertionError(f"{len(self.machine.sequences)} requests never ended")

    def hear_in_order(self) -> None:
        if self.outbox:
            self.step(Arrived(*self.outbox.pop(0)))
        elif self.inbox:
            role, incarnation, message = self.inbox.pop(0)
            if incarnation in self.alive:
                replies = self.workers[incarnation].handle(message)
                self.outbox.extend((role, incarnation, reply) for reply in replies)
        else:
            self.now = max(self.now, self.machine.deadline() or self.now)
            self.step(Tick())
            for role in ROLES:
                self.start_worker(role)

    def check_replay(self) -> None:
        machine = Machine(self.options)
        assert [machine.step(event, now) for event, now, _ in self.history] == [done for *_, done in self.history]


TestDisorder = Disorder.TestCase
TestDisorder.settings = settings(max_examples=120, stateful_step_count=60, deadline=None, derandomize=True)


def test_a_recorded_log_replays_to_the_same_commands(tmp_path):
    run = Disorder()
    run.begin("adaptive", 3)
    journal = Journal.to(str(tmp_path / "events"))
    run.submit(40, 2, 1.0)
    run.settle()
    for event, now, _ in run.history:
        journal.write(event, now)
    journal.close()

    machine = Machine(Options())
    commands = [machine.step(event, now) for event, now in replay(tmp_path / "events")]

    assert run.tokens[1] == reference(PROMPT, 40, 2)
    assert commands == [done for *_, done in run.history]
