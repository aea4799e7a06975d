"""Laws of the state machine, in virtual time."""

import random

import msgspec
import pytest
from msgspec import structs

from orchestrator.core.commands import Dismiss, Emit, Pardon, Reject, Replace, SendMessage
from orchestrator.core.events import Arrived, Ended
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.core.phases import AWAITING_TARGET, Phase
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.lab.simulate.simulation import SimulatedClient
from orchestrator.lab.simulate.worker_host import BuildWorker, SimulatedWorker, Work
from orchestrator.lab.simulate.workers import ModelledDraft, ModelledTarget
from orchestrator.runtime.recording import Journal, replay
from protocol.messages.base import NodeId, RequestId, Role
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Fault, Forest, Grow, Pong, Prefilled, Start, Stop, ToWorker, Verdict, Verify
from tests.support.scripted_simulation import (
    CONTEXT,
    DRAFT,
    LANGUAGE,
    ONE,
    TARGET,
    THREE,
    TWO,
    ScriptedSimulation,
    ready,
)
from tests.support.simulated_hours.invariants import reachable
from tests.support.simulation import Wire


def served(simulation: ScriptedSimulation) -> SimulatedClient:
    """The client of the first request after everything has happened; its tokens are the target's own."""
    simulation.run()
    client = simulation.clients[ONE]
    assert client.tokens == client.reference
    return client


def building(target: type[ModelledTarget] = ModelledTarget, draft: type[ModelledDraft] = ModelledDraft) -> BuildWorker:
    def build(role: Role) -> SimulatedWorker:
        return target(LANGUAGE, TARGET, CONTEXT) if role == "target" else draft(LANGUAGE, DRAFT, CONTEXT)

    return build


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens_are_the_targets_own_and_hits_are_told_as_they_come(strategy):
    simulation = ready(strategy)
    simulation.submit(1, max_tokens=40)
    client = served(simulation)

    assert (len(client.tokens), client.reason) == (40, "length")
    assert simulation.machine.deadline() is None
    told = [command.hit for command in simulation.commands if isinstance(command, Emit)]
    hits = [hit for hit in told if hit is not None]
    assert (sum(hits) / len(hits) if hits else None) == simulation.statistics().hit_rate


def test_the_target_may_begin_early_only_under_ar_and_not_behind_the_last_token():
    for strategy in STRATEGIES:
        simulation = ready(strategy)
        simulation.submit(1, max_tokens=20)
        simulation.run()
        sent = [getattr(command, "message", None) for command in simulation.commands]
        early = [verify.plain_next for verify in sent if isinstance(verify, Verify)]

        assert early == ([True] * 19 + [False] if strategy == "ar" else [False] * len(early))


def test_the_target_hears_before_the_round_is_counted():
    simulation = ready("adaptive")
    simulation.submit(1, max_tokens=60)
    simulation.run()
    machine, answered = Machine(Options()), 0
    for now, event, _ in simulation.history:
        answer = machine.step(event, now)
        verdict = isinstance(event, Arrived) and isinstance(event.message, Verdict)
        match answer.first:
            case [SendMessage(message=Verify())] if verdict:
                stats = machine.requests[ONE].stats
                counted, answered = stats.rounds, answered + 1
                assert len(answer.then()) == 2
                assert stats.rounds == counted + 1
            case _:
                answer.then()

    assert answered


def test_end_of_sequence_is_the_last_token():
    last = LANGUAGE.token(1, 3 + 7)
    simulation = ready()
    simulation.submit(1, max_tokens=50, ends=frozenset({last}))
    client = served(simulation)

    assert client.tokens.index(last) == len(client.tokens) - 1 == 7
    assert client.reason == "stop"


@pytest.mark.parametrize(("options", "context"), [({}, CONTEXT), ({"context": 100}, 100)])
def test_a_request_ends_where_the_context_ends_and_a_longer_prompt_is_refused(options: dict, context: int):
    simulation = ready(**options)
    simulation.submit(1, max_tokens=500, prompt=(5,) * (context - 40))
    simulation.submit(2, max_tokens=5, prompt=(5,) * context)
    simulation.run()
    (refusal,) = [command for command in simulation.commands if isinstance(command, Reject)]
    client = simulation.clients[ONE]

    assert (client.tokens, client.reason) == (client.reference[:40], "length")
    assert f"context of {context}" in refusal.text


def test_requests_wait_for_a_target_that_still_loads():
    simulation = ScriptedSimulation()
    simulation.submit(1, max_tokens=5)
    simulation.settle()
    assert simulation.commands == []

    simulation.start("target")
    served(simulation)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_draft_decoding_is_plain(strategy):
    simulation = ScriptedSimulation(Options(strategy=strategy))
    simulation.start("target")
    simulation.submit(1, max_tokens=12)
    served(simulation)

    assert all(len(verify.tokens) == 1 for verify in simulation.sent(Verify))


@pytest.mark.sampled(24)
@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("events", range(1, 24, 3))
def test_a_worker_may_die_at_any_moment(strategy, role, events):
    simulation = ready(strategy)
    simulation.submit(1, max_tokens=30)
    simulation.run_events(events)
    simulation.kill(role)
    simulation.run_events(3)
    simulation.start(role)

    assert served(simulation).reason == "length"


def run_with_deaths(simulation, poison, deaths=10):
    """Until all requests have ended; a target that has to verify or to prefill the request `poison` ends."""
    target = None
    while simulation.live and deaths:
        if simulation.own.get("target") not in simulation.hosts:
            target = simulation.start("target")
        at_work = simulation.machine.requests.get(poison)
        if at_work is not None and at_work.phase in AWAITING_TARGET and target is not None:
            deaths -= 1
            simulation.kill("target")
        else:
            assert simulation.advance()
    return 10 - deaths


def test_a_request_over_which_two_targets_end_is_rejected_and_the_others_go_on():
    simulation = ScriptedSimulation(Options())
    for number in (1, 2, 3):
        simulation.submit(number, max_tokens=30)

    assert run_with_deaths(simulation, TWO) == 2
    rejected = [command for command in simulation.commands if isinstance(command, Reject | Pardon)]
    assert [type(command) for command in rejected] == [Reject, Pardon]
    assert "Two targets ended while they computed this request" in simulation.clients[TWO].reason
    for other in (ONE, THREE):
        assert simulation.clients[other].tokens == simulation.clients[other].reference


def test_requests_beside_the_one_that_ends_targets_are_tried_one_by_one():
    simulation = ScriptedSimulation(Options())
    for number in range(1, 9):
        simulation.submit(number, max_tokens=10)
    simulation.start("target")
    # All eight are at work.
    simulation.run_while(lambda: len(simulation.sent(Verify)) + len(simulation.sent(Forest)) < 3)
    simulation.kill("target")

    assert run_with_deaths(simulation, RequestId(5)) == 1
    refused = [command.request for command in simulation.commands if isinstance(command, Reject)]
    assert refused == [5]
    assert all(client.tokens == client.reference for id, client in simulation.clients.items() if id != 5)


def test_targets_that_end_between_two_rounds_blame_nobody():
    simulation = ready("ar")
    simulation.submit(1, max_tokens=30)
    for verifications in (3, 6, 9, 12):
        simulation.run_while(lambda count=verifications: len(simulation.sent(Verify)) < count)
        simulation.kill("target")
        simulation.start("target")
    served(simulation)


def test_an_unanswered_verification_is_sent_again():
    simulation = ready("ar")
    simulation.submit(1, max_tokens=30)
    simulation.holds = lambda message: isinstance(message, Verdict)
    simulation.run_while(lambda: not simulation.sent(Verify))

    def answer_ping() -> None:
        simulation.step(Arrived("target", simulation.own["target"], Pong(0.0)))

    simulation.clock.at(2.0, answer_ping)
    simulation.run_until(6.0)

    first, again = simulation.sent(Verify)
    assert again == first


def test_a_target_that_stays_silent_is_replaced():
    simulation = ready("ar")
    simulation.submit(1, max_tokens=30)
    simulation.hosts[simulation.own["target"]].freeze()
    served(simulation)

    assert sum(isinstance(command, Replace) for command in simulation.commands) == 1


def test_a_target_whose_forwards_take_ever_longer_is_not_replaced():
    """The chunks of a long prompt, on a slow machine."""
    simulation = ready("ar")
    simulation.submit(1, max_tokens=30)
    target = simulation.hosts[simulation.own["target"]]
    for seconds in (20.0, 70.0, 200.0):
        target.freeze()
        simulation.run_until(simulation.now + seconds)
        target.thaw()
        simulation.run_until(simulation.now + 0.1)
    served(simulation)

    assert not any(isinstance(command, Replace) for command in simulation.commands)


def test_a_target_that_stood_still_with_the_orchestrator_goes_on():
    """All processes were stopped for minutes, and the target is the last one to go on."""
    simulation = ready("ar")
    simulation.submit(1, max_tokens=30)
    target = simulation.hosts[simulation.own["target"]]
    target.freeze()
    simulation.run_until(simulation.now + 2.0)
    simulation.clock.now += 300.0
    simulation.run_until(simulation.now + 2.0)
    target.thaw()
    served(simulation)

    assert not any(isinstance(command, Replace) for command in simulation.commands)


@pytest.mark.parametrize("strategy", ["sd", "ssd"])
def test_a_draft_that_falls_silent_is_waited_for_only_once(strategy):
    simulation = ready(strategy)
    simulation.hosts[simulation.own["draft"]].freeze()
    simulation.submit(1, max_tokens=20)
    served(simulation)

    assert simulation.statistics().elapsed < 1.0


def test_a_draft_that_lost_its_place_is_started_again():
    simulation = ready()
    simulation.submit(1, max_tokens=60)
    simulation.run_events(8)
    draft = simulation.own["draft"]
    simulation.hosts[draft].send(Stop(ONE))
    served(simulation)

    assert len(simulation.sent(Start, draft)) == 2


@pytest.mark.parametrize("reason", ["cancelled", "stop"])
def test_an_ended_request_leaves_nothing_and_the_others_go_on(reason):
    simulation = ready()
    first, second = simulation.submit(1, max_tokens=200), simulation.submit(2, max_tokens=20)
    simulation.run_events(9)
    simulation.step(Ended(first, reason))
    assert simulation.step(Ended(first, reason)) == []
    simulation.settle()

    assert simulation.clients[first].reason == reason
    assert simulation.clients[second].tokens == simulation.clients[second].reference
    assert simulation.machine.requests == {}
    assert {stop.request for stop in simulation.sent(Stop, simulation.own["target"])} == {first, second}


class RefusingTarget(ModelledTarget):
    """Takes no tree but a root."""

    def handle(self, message: ToWorker) -> Work:
        if isinstance(message, Verify) and len(message.tokens) > 1:
            return Work((Fault("refused", "nonsense", message.request, len(message.tokens) - 1),))
        return super().handle(message)


def test_a_tree_that_the_target_refuses_costs_the_draft_and_not_the_request():
    """The target was asked again and again, and its answers come when only the root is asked about."""
    simulation = ready(build=building(target=RefusingTarget))
    simulation.submit(1, max_tokens=20)
    simulation.run_while(lambda: not simulation.sent(Stop))
    for _ in range(9):
        simulation.step(Arrived("target", simulation.own["target"], Fault("refused", "nonsense", ONE, 3)))
    served(simulation)

    assert sum(len(verify.tokens) > 1 for verify in simulation.sent(Verify)) == 1
    assert Stop(ONE) in simulation.sent(Stop, simulation.own["draft"])


def test_a_root_that_the_target_refuses_ends_the_request():
    simulation = ready("ar")
    simulation.submit(1, max_tokens=30)
    simulation.run_while(lambda: not simulation.sent(Verify))
    commands = simulation.step(Arrived("target", simulation.own["target"], Fault("refused", "too long", ONE)))

    assert commands[-1] == Reject(ONE, "too long")


class EmptyGrowthDraft(ModelledDraft):
    """Grows without end, but never the chain that is asked for."""

    started = False

    def handle(self, message: ToWorker) -> Work:
        self.started = self.started or isinstance(message, Start)
        return Work()

    def work(self) -> Work | None:
        return Work((Grow(ONE, 0, (), (), (), 1, 0.1),), 0.1) if self.started else None


@pytest.mark.parametrize("strategy", ["sd", "ssd"])
def test_a_draft_that_grows_for_ever_and_never_delivers_is_not_waited_for(strategy):
    simulation = ready(strategy, building(draft=EmptyGrowthDraft), fallback="neural")
    simulation.submit(1, max_tokens=3)
    served(simulation)

    assert simulation.now < 60.0


def test_a_draft_too_far_away_to_help_after_a_miss_is_not_waited_for():
    """Its growth for a root comes several rounds late, again and again: waiting for it would be in vain."""
    plain, far = ScriptedSimulation(Options(strategy="ar")), ScriptedSimulation(Options(strategy="adaptive"))
    for simulation in (plain, far):
        simulation.start("target")
        simulation.attach(simulation.build("draft"), wire=Wire(delay=0.1))
        simulation.submit(1, max_tokens=80)
        served(simulation)

    assert far.statistics().elapsed < 1.05 * plain.statistics().elapsed


@pytest.mark.parametrize("kind", ["lost", "refused"])
def test_a_fault_of_a_target_that_owes_nothing_is_stale(kind):
    simulation = ready("sd")
    simulation.submit(1, max_tokens=200)
    simulation.run_while(lambda: simulation.machine.requests[ONE].phase is not Phase.READY)
    before = simulation.machine.stale
    commands = simulation.step(Arrived("target", simulation.own["target"], Fault(kind, "late", ONE)))

    assert simulation.machine.stale == before + 1
    assert commands == []


class WrongAnswerTarget(ModelledTarget):
    """Answers what it was never asked, again and again, until it is told to start anew."""

    starts = 0

    def handle(self, message: ToWorker) -> Work:
        self.starts += isinstance(message, Start)
        if isinstance(message, Verify) and self.starts == 1 and message.round == 2:
            return Work((Verdict(message.request, message.round, (NodeId(5),), 1, 0.01),))
        return super().handle(message)


def test_a_target_that_holds_an_answer_to_no_question_is_told_to_start_anew():
    simulation = ready("ar", building(target=WrongAnswerTarget))
    simulation.submit(1, max_tokens=10)
    served(simulation)

    assert len(simulation.sent(Start, simulation.own["target"])) == 2


def test_target_and_drafts_draw_with_the_request_s_sampling():
    simulation = ready("sd")
    simulation.submit(1, max_tokens=60, temperature=1.0)
    simulation.run_events(20)
    lost = simulation.own["draft"]
    assert simulation.kill("draft")
    simulation.run()

    for incarnation in (simulation.own["target"], lost, simulation.own["draft"]):
        assert heard(simulation, incarnation) == {Sampling(temperature=1.0, seed=1)}


def heard(simulation: ScriptedSimulation, incarnation: int) -> set[Sampling]:
    return {start.sampling for start in simulation.sent(Start, incarnation)}


def test_a_target_whose_files_were_exchanged_continues_nothing():
    simulation = ScriptedSimulation(Options())
    fingerprints = iter(["a", "a", "b"])

    def build(role):
        worker = ModelledTarget(LANGUAGE, TARGET, CONTEXT)
        worker.hello = structs.replace(worker.hello, model_fingerprint=next(fingerprints))
        return worker

    simulation.build = build
    simulation.start("target")
    simulation.submit(1, max_tokens=30)
    simulation.run_events(6)
    simulation.kill("target")
    simulation.start("target")
    simulation.run_events(6)
    assert not [command for command in simulation.commands if isinstance(command, Dismiss)]
    simulation.kill("target")
    simulation.start("target")

    (dismissed,) = [command for command in simulation.commands if isinstance(command, Dismiss)]
    assert "were exchanged while the pipeline ran" in dismissed.text


def test_a_recorded_log_replays_to_the_same_commands(tmp_path):
    simulation = ready("adaptive")
    simulation.submit(2, 40, temperature=1.0)
    simulation.run()
    journal = Journal(str(tmp_path / "events"))
    for now, event, _ in simulation.history:
        journal.write(event, now)
    journal.close()

    machine = Machine(simulation.options)
    commands = [machine.step(event, now).all() for event, now in replay(tmp_path / "events")]
    assert commands == [commands for *_, commands in simulation.history]


# Messages that come late --------------------------------------------------------------------------


LIVE, OVER, UNKNOWN = RequestId(2), RequestId(1), RequestId(77)
MANY = 100_000


def in_the_middle() -> ScriptedSimulation:
    """One request is over, one is under verification."""
    simulation = ready()
    simulation.submit(OVER, max_tokens=20)
    simulation.run()
    simulation.submit(LIVE, max_tokens=300)
    sequence = simulation.machine.requests[LIVE]
    simulation.run_while(lambda: sequence.round < 12 or sequence.phase is not Phase.VERIFYING)
    for role, incarnation in simulation.own.items():
        simulation.step(Arrived(role, incarnation, Pong(0.0)))
    return simulation


def state(simulation: ScriptedSimulation) -> list[int | float | str | None]:
    """All plain values that the machine holds but the count of what was not acted on."""
    machine = simulation.machine
    stale, machine.stale = machine.stale, 0
    values = [item for item in reachable(machine) if isinstance(item, int | float | str | None)]
    machine.stale = stale
    return values


def stale_event(simulation: ScriptedSimulation, source: random.Random) -> Arrived:
    """Something that was once true, or is true of others."""
    sequence = simulation.machine.requests[LIVE]
    target, draft = simulation.own["target"], simulation.own["draft"]
    old = source.randrange(sequence.round)
    path = tuple(NodeId(source.getrandbits(62)) for _ in range(source.randrange(1, 4)))
    growth = Grow(LIVE, old, (sequence.tree.root.id,), (3,), (0.9,), 1, 0.01)
    verdict = Verdict(LIVE, old, (), 3, 0.01)
    return source.choice(
        (
            lambda: Arrived("target", target, verdict),
            lambda: Arrived("target", target, msgspec.structs.replace(verdict, round=sequence.round + 1)),
            lambda: Arrived("target", target, msgspec.structs.replace(verdict, round=sequence.round, path=path)),
            lambda: Arrived("target", target, msgspec.structs.replace(verdict, request=OVER)),
            lambda: Arrived("target", target + source.choice((-1, 1)), verdict),
            lambda: Arrived("target", target, Prefilled(LIVE, old, 2, 0.01)),
            lambda: Arrived("target", target, Prefilled(LIVE, sequence.round, 2, 0.01)),
            lambda: Arrived("target", target, Fault("lost", "late", OVER)),
            lambda: Arrived("target", target, Fault("refused", "late", UNKNOWN)),
            lambda: Arrived("draft", draft + source.choice((-1, 1)), growth),
            lambda: Arrived("draft", draft, msgspec.structs.replace(growth, request=OVER)),
            lambda: Arrived("draft", draft, Fault("lost", "late", UNKNOWN)),
        )
    )()


def test_stale_messages_change_nothing_and_are_counted():
    simulation, source = in_the_middle(), random.Random(5)
    before, counted = state(simulation), simulation.machine.stale
    for _ in range(MANY):
        assert simulation.machine.step(stale_event(simulation, source), simulation.now).all() == []

    assert state(simulation) == before
    assert simulation.machine.stale == counted + MANY
    simulation.run()
    assert len(simulation.clients[LIVE].tokens) == 300
    assert simulation.machine.requests == {}


def test_growth_that_comes_again_in_any_order_adds_no_node_and_asks_for_nothing():
    simulation, source = in_the_middle(), random.Random(6)
    tree = simulation.machine.requests[LIVE].tree
    nodes = sorted(node.id for node in tree)
    known = [node for node in tree if node.parent is not None]
    for _ in range(MANY // 10):
        some = source.sample(known, min(len(known), 4))
        parents = tuple(node.parent.id for node in some if node.parent is not None)
        tokens = tuple(node.token for node in some)
        growth = Grow(LIVE, source.randrange(9), parents, tokens, tuple(0.5 for _ in some), 1, 0.004)
        assert simulation.machine.step(Arrived("draft", simulation.own["draft"], growth), simulation.now).all() == []

    assert sorted(node.id for node in tree) == nodes


def test_the_state_that_is_compared_notices_a_change():
    """Otherwise the tests above could not fail."""
    simulation = in_the_middle()
    before = state(simulation)
    commands = simulation.step(Ended(LIVE, "cancelled"))

    assert any(isinstance(command, SendMessage) for command in commands)
    assert state(simulation) != before
