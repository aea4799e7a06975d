"""Laws of the state machine, driven without any process."""

import heapq
import itertools

import msgspec
import pytest

from orchestrator.core.commands import Command, Dismiss, Emit, Finish, Reject, Replace, SendMessage
from orchestrator.core.events import Arrived, Ended, Event, Request, Submitted, Tick, WorkerDown, WorkerUp
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options, StrategyName
from orchestrator.core.phases import Phase
from protocol.messages.base import NodeId, Role, SequenceId
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Fault, FromWorker, Grow, Reroot, Start, Stop, ToWorker, Verdict, Verify
from tests.support.simulated_workers import CONTEXT, SimulatedDraft, SimulatedTarget, hello, reference

STRATEGIES = ["ar", "sd", "ssd", "adaptive"]
PROMPT = (1, 2, 3)


class Bench:
    """A machine with simulated workers, each of which answers after the seconds that it says it took."""

    def __init__(self, options: Options | None = None, draft: SimulatedDraft | None = None) -> None:
        self.machine = Machine(options or Options())
        self.workers = {"target": SimulatedTarget(), "draft": draft or SimulatedDraft()}
        self.incarnations: dict[Role, int] = {}
        self.now = 0.0
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}
        self.delay: dict[Role, float] = {"target": 0.0, "draft": 0.0}
        """Seconds that a worker's messages are on their way."""
        self.log: list[Command] = []
        self.steps: list[list[Command]] = []
        self.queue: list[tuple[float, int, Role, int, FromWorker]] = []
        self.order = itertools.count()

    def step(self, event: Event) -> list[Command]:
        commands = self.machine.step(event, self.now)
        self.steps.append(commands)
        for command in commands:
            self._perform(command)
        return commands

    def up(self, role: Role, tokenizer: str = "same") -> list[Command]:
        self.incarnations[role] = self.incarnations.get(role, 0) + 1
        self.workers[role] = SimulatedTarget() if role == "target" else SimulatedDraft()
        return self.step(WorkerUp(self.incarnations[role], hello(role, tokenizer)))

    def submit(self, id: int = 1, max_tokens: int = 30, prompt: tuple[int, ...] = PROMPT, **request) -> None:
        sampling = Sampling(seed=id)
        self.step(Submitted(SequenceId(id), Request(prompt, sampling, max_tokens, **request)))

    def run(self, turns: int = 2000) -> None:
        for _ in range(turns):
            deadline = self.machine.deadline()
            if self.queue and (deadline is None or self.queue[0][0] <= deadline):
                at, _, role, incarnation, message = heapq.heappop(self.queue)
                self.now = max(self.now, at)
                self.step(Arrived(role, incarnation, message))
            elif deadline is not None:
                self.now = max(self.now, deadline)
                self.step(Tick())
            else:
                return

    def _perform(self, command: Command) -> None:
        self.log.append(command)
        match command:
            case SendMessage(role, message, incarnation):
                for reply in self.workers[role].handle(message):
                    at = self.now + getattr(reply, "seconds", 0.0) + self.delay.get(role, 0.0)
                    sender = incarnation or self.incarnations[role]
                    heapq.heappush(self.queue, (at, next(self.order), role, sender, reply))
            case Emit(sequence, tokens):
                self.tokens.setdefault(sequence, []).extend(tokens)
            case Finish():
                self.finished[command.sequence] = command


def told(bench: Bench, kind: type) -> list:
    return [
        command.message
        for command in bench.log
        if isinstance(command, SendMessage) and isinstance(command.message, kind)
    ]


def ready(strategy: StrategyName = "adaptive", **options) -> Bench:
    bench = Bench(Options(strategy=strategy, **options))
    bench.up("target")
    bench.up("draft")
    return bench


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens_are_the_targets_own(strategy):
    bench = ready(strategy)
    bench.submit(max_tokens=40)
    bench.run()

    assert bench.tokens[1] == reference(PROMPT, 40, seed=1)
    assert bench.finished[1].reason == "length"


@pytest.mark.parametrize("strategy", ["sd", "ssd", "adaptive"])
def test_a_good_draft_saves_rounds(strategy):
    bench = ready(strategy, fallback="neural")
    bench.submit(max_tokens=60)
    bench.run()

    assert bench.finished[1].statistics.tokens_per_round > 1.4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hits_are_told_as_they_come(strategy):
    bench = ready(strategy)
    bench.submit(max_tokens=40)
    bench.run()

    told = [command.hit for command in bench.log if isinstance(command, Emit)]
    hits = [hit for hit in told if hit is not None]
    rate = bench.finished[SequenceId(1)].statistics.hit_rate
    assert (sum(hits) / len(hits) if hits else None) == rate


def test_the_target_hears_first_then_the_draft_then_the_client():
    bench = ready("adaptive")
    bench.submit(max_tokens=60)
    bench.run()
    steps = [[type(getattr(command, "message", command)) for command in step] for step in bench.steps]

    hits = [kinds for kinds in steps if {Verify, Emit} <= set(kinds)]
    assert hits
    assert all(kinds == [Verify, Reroot, Emit] for kinds in hits)


def test_end_of_sequence_is_the_last_token():
    expected = reference(PROMPT, 50, seed=1)
    bench = ready()
    bench.submit(max_tokens=50, ends=frozenset({expected[7]}))
    bench.run()

    assert bench.tokens[1] == expected[: expected.index(expected[7]) + 1]
    assert bench.finished[1].reason == "stop"


def test_a_request_ends_where_the_context_ends():
    prompt = tuple(range(40)) * 9
    bench = ready()
    bench.submit(max_tokens=500, prompt=prompt)
    bench.run()

    assert len(bench.tokens[1]) == CONTEXT - len(prompt)
    assert bench.finished[1].reason == "length"


def test_a_prompt_beyond_the_context_is_refused_with_a_sentence():
    bench = ready()
    bench.submit(prompt=tuple([1] * CONTEXT))

    (refusal,) = [command for command in bench.log if isinstance(command, Reject)]
    assert "context of 400" in refusal.text


def test_requests_wait_for_a_target_that_still_loads():
    bench = Bench()
    bench.submit(max_tokens=5)
    assert bench.log == []

    bench.up("target")
    bench.run()

    assert bench.tokens[1] == reference(PROMPT, 5, seed=1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_draft_decoding_is_plain(strategy):
    bench = Bench(Options(strategy=strategy))
    bench.up("target")
    bench.submit(max_tokens=12)
    bench.run()

    assert bench.tokens[1] == reference(PROMPT, 12, seed=1)


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("turns", range(1, 24, 3))
def test_a_worker_may_die_at_any_moment(strategy, role, turns):
    bench = ready(strategy)
    bench.submit(max_tokens=30)
    bench.run(turns)
    bench.step(WorkerDown(role, bench.incarnations[role]))
    bench.queue = [item for item in bench.queue if item[2] != role]
    heapq.heapify(bench.queue)
    bench.run(3)
    bench.up(role)
    bench.run()

    assert bench.tokens[1] == reference(PROMPT, 30, seed=1)


def test_messages_of_a_former_life_change_nothing():
    bench = ready("ar")
    bench.submit()
    bench.run(3)
    verify = told(bench, Verify)[-1]
    before = bench.machine.stale
    commands = bench.step(Arrived("target", 99, Verdict(SequenceId(1), verify.round, (), 5, 0.1)))

    assert commands == []
    assert bench.machine.stale == before + 1


def test_a_path_that_was_not_sent_is_not_believed():
    bench = ready("ar")
    bench.submit()
    bench.run(2)
    verify = told(bench, Verify)[-1]
    commands = bench.step(Arrived("target", 1, Verdict(SequenceId(1), verify.round, (verify.root,), 5, 0.1)))

    assert commands == []


def test_an_unanswered_verification_is_sent_again():
    bench = ready("ar")
    bench.submit()
    bench.run(1)
    bench.queue.clear()
    bench.now = bench.machine.deadline() or 0.0
    (again,) = bench.step(Tick())

    assert isinstance(again, SendMessage)
    assert again.message == told(bench, Verify)[0]


def test_a_target_that_stays_silent_is_replaced():
    bench = ready("ar")
    bench.submit()
    bench.queue.clear()
    bench.now = 1000.0
    commands = bench.step(Tick())

    assert [type(command) for command in commands] == [Replace]


@pytest.mark.parametrize("strategy", ["sd", "ssd"])
def test_a_draft_that_falls_silent_is_waited_for_only_once(strategy):
    bench = ready(strategy)
    bench.workers["draft"].handle = lambda message: []
    bench.submit(max_tokens=20)
    bench.run()

    assert bench.tokens[1] == reference(PROMPT, 20, seed=1)
    assert bench.finished[1].statistics.elapsed < 1.0


def test_a_draft_that_lost_its_place_is_started_again():
    bench = ready()
    bench.submit(max_tokens=60)
    bench.run(8)
    bench.workers["draft"].states.clear()
    bench.run()

    starts = [command for command in bench.log if isinstance(command, SendMessage) and command.role == "draft"]
    assert sum(isinstance(command.message, Start) for command in starts) == 2
    assert bench.tokens[1] == reference(PROMPT, 60, seed=1)


def test_a_draft_with_another_tokenizer_is_dismissed_with_a_sentence():
    bench = Bench()
    bench.up("target")
    (dismissed,) = bench.up("draft", tokenizer="other")

    assert isinstance(dismissed, Dismiss)
    assert "another tokenizer" in dismissed.text


@pytest.mark.parametrize("reason", ["cancelled", "stop"])
def test_an_ended_request_leaves_nothing_and_the_others_go_on(reason):
    bench = ready()
    bench.submit(1, max_tokens=200)
    bench.submit(2, max_tokens=20)
    bench.run(9)
    bench.step(Ended(SequenceId(1), reason))
    bench.run()

    assert bench.finished[1].reason == reason
    assert bench.tokens[2] == reference(PROMPT, 20, seed=2)
    assert bench.machine.sequences == {}
    assert bench.workers["target"].sequences == {}


def test_nothing_is_due_when_nothing_is_asked():
    bench = ready()
    bench.submit(max_tokens=5)
    bench.run()

    assert bench.machine.deadline() is None


class Fastidious(SimulatedTarget):
    """Takes no tree but a root."""

    def handle(self, message: ToWorker) -> list[FromWorker]:
        if isinstance(message, Verify) and len(message.tokens) > 1:
            return [Fault("refused", "nonsense", message.sequence, len(message.tokens) - 1)]
        return super().handle(message)


def test_a_tree_that_the_target_refuses_costs_the_draft_and_not_the_request():
    bench = ready()
    bench.workers["target"] = Fastidious()
    bench.submit(max_tokens=20)
    bench.run()

    assert bench.tokens[1] == reference(PROMPT, 20, seed=1)
    assert sum(len(verify.tokens) > 1 for verify in told(bench, Verify)) == 1
    assert SendMessage("draft", Stop(SequenceId(1)), bench.incarnations["draft"]) in bench.log


def test_a_root_that_the_target_refuses_ends_the_request():
    bench = ready("ar")
    bench.submit()
    bench.run(turns=1)
    bench.step(Arrived("target", bench.incarnations["target"], Fault("refused", "too long", SequenceId(1))))

    assert bench.log[-1] == Reject(SequenceId(1), "too long")


class Rambler(SimulatedDraft):
    """Grows without end, but never the chain that is asked for."""

    def _grow(self, sequence: SequenceId) -> Grow:
        return msgspec.structs.replace(super()._grow(sequence), parents=(), tokens=(), probabilities=(), seconds=0.1)


@pytest.mark.parametrize("strategy", ["sd", "ssd"])
def test_a_draft_that_grows_for_ever_and_never_delivers_is_not_waited_for(strategy):
    bench = ready(strategy, fallback="neural")
    bench.workers["draft"] = Rambler()
    bench.submit(max_tokens=3)
    while 1 not in bench.finished:
        bench.step(Arrived("draft", bench.incarnations["draft"], Grow(SequenceId(1), 0, (), (), (), 1, 0.1)))
        bench.run(turns=2)
        bench.now += 0.1
        assert bench.now < 60.0

    assert bench.tokens[1] == reference(PROMPT, 3, seed=1)


def test_a_draft_too_far_away_to_help_after_a_miss_is_not_waited_for():
    """Its growth for a root comes several rounds late, again and again: waiting for it would be in vain."""

    class Far(SimulatedDraft):
        def handle(self, message):
            return [msgspec.structs.replace(grow, parents=(), tokens=(), probabilities=()) for grow in grown(message)]

    near = SimulatedDraft()
    grown = near.handle
    bench = ready("adaptive")
    bench.workers["draft"] = Far()
    bench.delay["draft"] = 0.2
    bench.submit(max_tokens=80)
    bench.run()
    plain = ready("ar")
    plain.submit(max_tokens=80)
    plain.run()

    assert bench.tokens[1] == plain.tokens[1]
    assert bench.finished[1].statistics.elapsed < 1.05 * plain.finished[1].statistics.elapsed


@pytest.mark.parametrize("kind", ["lost", "refused"])
def test_a_fault_of_a_target_that_owes_nothing_is_stale(kind):
    bench = ready("sd")
    bench.submit(1, max_tokens=200)
    while bench.machine.sequences[SequenceId(1)].phase is not Phase.READY:
        bench.run(turns=1)
    before, told = bench.machine.stale, len(bench.log)
    bench.step(Arrived("target", bench.incarnations["target"], Fault(kind, "late", SequenceId(1))))

    assert bench.machine.stale == before + 1
    assert len(bench.log) == told


def test_a_tree_that_is_refused_twice_does_not_end_the_request():
    """The target was asked again and again, and its answers come when only the root is asked about."""
    bench = ready()
    bench.workers["target"] = Fastidious()
    bench.submit(max_tokens=20)
    while not told(bench, Stop):
        bench.run(turns=1)
    for _ in range(9):
        late = Fault("refused", "nonsense", SequenceId(1), 3)
        bench.step(Arrived("target", bench.incarnations["target"], late))
    bench.run()

    assert bench.tokens[1] == reference(PROMPT, 20, seed=1)


class Stubborn(SimulatedTarget):
    """Answers what it was never asked, again and again, until it is told to start anew."""

    starts = 0

    def handle(self, message: ToWorker) -> list[FromWorker]:
        self.starts += isinstance(message, Start)
        if isinstance(message, Verify) and self.starts == 1 and message.round == 2:
            return [Verdict(message.sequence, message.round, (NodeId(5),), 1, 0.01)]
        return super().handle(message)


def test_a_target_that_holds_an_answer_to_no_question_is_told_to_start_anew():
    bench = ready("ar")
    target = bench.workers["target"] = Stubborn()
    bench.submit(max_tokens=10)
    bench.run()

    assert bench.tokens[1] == reference(PROMPT, 10, seed=1)
    assert target.starts == 2
