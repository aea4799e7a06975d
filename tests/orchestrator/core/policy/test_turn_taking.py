"""Laws of rest: the draft rests beside the target where that is faster, and for long where it is never right."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import islice, product
from typing import Any, TypeVar

import pytest
from msgspec import structs

from orchestrator.core.commands import SendMessage
from orchestrator.core.drafts.election import Election
from orchestrator.core.estimates import Asked, MeasuredRound, TurnTaking, WidthCost
from orchestrator.core.expected_rate import Expected
from orchestrator.core.options import Options
from orchestrator.core.phases import COMPARING
from orchestrator.core.policy.adaptive import Adaptive
from orchestrator.core.policy.decision import Decision, VerifyNodes, WaitUntil
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.core.request import Request
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.devices import Devices
from orchestrator.lab.simulate.worker_host import Work
from orchestrator.lab.simulate.workers import ModelledDraft
from protocol.messages.client import Statistics
from protocol.messages.plans import BestFirst
from protocol.messages.worker import Extend, Grow, Reroot, Start, ToWorker
from protocol.worker.pacing import DevicePace
from tests.support.simulation import Simulation, modelled_pipeline

STEP = 0.006
TARGET = DevicePace(steps=((1, 0.021), (8, 0.036), (16, 0.052)), prefill_rate=800.0)
DRAFT = DevicePace(steps=((1, STEP), (16, 0.0065)), prefill_rate=4000.0)
ONE_GPU = Devices(target=TARGET, draft=DRAFT, baseline_draft=DRAFT, slow_down=2.0)


def chosen(alone: float, beside: float, waiting: float, rounds: int) -> list[bool]:
    """The mode after each round. Forwards take `alone` or `beside` seconds; in turns a round also waits."""
    turns, cost, modes = TurnTaking(), WidthCost(), []
    for _ in range(rounds):
        forward = alone if turns.in_turns else beside
        if not turns.in_turns:
            cost.observe(4, forward)
        seconds = forward + (waiting if turns.in_turns else 0.0)
        turns.observe(MeasuredRound(2.0, seconds, 4, forward), cost, STEP)
        modes.append(turns.in_turns)
    return modes


def test_a_draft_that_halves_the_targets_speed_rests_meanwhile():
    modes = chosen(alone=0.02, beside=0.04, waiting=STEP, rounds=2000)

    # A short request never pays for a try, and the other mode is tried again, but seldom.
    assert not any(modes[:250])
    assert sum(modes[300:]) > 0.9 * len(modes[300:])


def test_a_try_that_is_slower_for_other_reasons_is_given_up():
    """For instance behind a network, where each request for a step costs a round trip."""
    modes = chosen(alone=0.02, beside=0.03, waiting=0.05, rounds=2000)

    assert 0 < sum(modes) < 0.1 * len(modes)


def test_a_stall_decides_nothing():
    turns, cost = TurnTaking(), WidthCost()
    for number in range(400):
        forward = 0.02 if turns.in_turns else 0.04
        cost.observe(4, forward) if not turns.in_turns else None
        stall = 5.0 if number == 270 else 0.0
        turns.observe(MeasuredRound(2.0, forward + stall + (STEP if turns.in_turns else 0.0), 4, forward), cost, STEP)

    assert turns.in_turns


def decoded(devices: Devices, accept: float, tokens: int = 300, **options: Any) -> Simulation:
    language = ModelledLanguage(AcceptanceModel(accept=accept))
    simulation = modelled_pipeline(Options(**options), language, devices, kept=None)
    simulation.submit(1, tokens)
    simulation.run()
    return simulation


@pytest.mark.thorough
@pytest.mark.parametrize("accept", [0.5, 0.8])
def test_on_one_gpu_turns_are_faster_than_growth_beside_the_target(accept: float):
    turns = decoded(ONE_GPU, accept, placement="shared")
    adaptive, (client,) = turns.now, turns.clients.values()
    beside = decoded(ONE_GPU, accept, placement="apart").now

    assert client.tokens == client.reference
    assert adaptive < 0.93 * beside


def test_only_rounds_beside_a_draft_that_grows_count_as_overlapped():
    def share(**options: Any) -> float:
        (client,) = decoded(ONE_GPU, 0.6, 60, **options).clients.values()
        assert client.statistics is not None
        return client.statistics.overlapped_rounds / client.statistics.rounds

    assert share(placement="shared") == share(strategy="ar") == 0.0
    assert share(placement="apart") > 0.9


Kind = TypeVar("Kind", Start, Reroot, Extend)


def sent(simulation: Simulation, kind: type[Kind], since: int = 0) -> list[tuple[float, int | None, Kind]]:
    """Messages to the drafts, with the time and the draft, after so many events of the history."""
    return [
        (now, command.incarnation, command.message)
        for now, _, commands in islice(simulation.history, since, None)
        for command in commands
        if isinstance(command, SendMessage) and command.role == "draft" and isinstance(command.message, kind)
    ]


def requests(simulation: Simulation) -> list[tuple[float, Extend]]:
    """When the draft was asked for steps."""
    return [(now, extend) for now, _, extend in sent(simulation, Extend)]


def rests(message: Start | Reroot) -> bool:
    assert isinstance(message.plan, BestFirst)
    return message.plan.steps is not None


def test_a_resting_draft_is_asked_for_each_step_once():
    asked = [extend for _, extend in requests(decoded(ONE_GPU, 0.6, placement="shared"))]

    assert len({(extend.round, extend.steps) for extend in asked}) == len(asked) > 20


@pytest.mark.thorough
def test_on_two_devices_nobody_is_asked_after_the_try():
    apart = decoded(replace(ONE_GPU, slow_down=1.05), 0.6, tokens=1500)
    asked = requests(apart)

    assert len(asked) <= 12
    assert all(now < 0.5 * apart.now for now, _ in asked)


def in_turns(accept: float = 0.6) -> Simulation:
    """After a request during which the draft took turns."""
    return decoded(ONE_GPU, accept, placement="shared")


def decode(simulation: Simulation, number: int, prompt: int = 8, tokens: int = 300) -> Statistics:
    sequence = simulation.submit(number, tokens, prompt=tuple(range(number, number + prompt)))
    simulation.run()
    client = simulation.clients[sequence]
    assert client.tokens == client.reference
    assert client.statistics is not None
    return client.statistics


def test_a_later_request_with_a_long_prompt_is_drafted_too():
    """Its draft takes the first step unasked, since nobody knows when its prefill will be done."""
    simulation = in_turns()
    begun = simulation.now
    statistics = [decode(simulation, number, prompt=1500) for number in range(2, 5)]

    assert all(each.acceptance_rate is not None and each.acceptance_rate > 0.3 for each in statistics)
    assert sum(now > begun for now, _ in requests(simulation)) > 100
    plans = [start.plan for _, _, start in sent(simulation, Start)]
    assert all(isinstance(plan, BestFirst) and plan.steps == 1 for plan in plans)


@pytest.mark.parametrize("context", [384, 8192])
def test_a_short_answer_is_drafted_unless_the_draft_must_read_long_for_it(context: int):
    simulation = in_turns()
    simulation.remove(simulation.own["draft"])
    simulation.build = lambda _: ModelledDraft(simulation.language, DRAFT, context)
    simulation.start("draft")
    decode(simulation, 2, prompt=3000)
    before = len(simulation.history)

    simulation.submit(3, 60, prompt=tuple(range(9, 3009)))
    simulation.run()

    assert len(sent(simulation, Start, before)) == (context < 3000)


@cache
def conversation(
    strategy: str, kept: int, turns: int = 8, first: int = 8000, answer: int = 200, pause: float = 3.0
) -> tuple[list[bool], float]:
    """Of a draft that reads the whole context, at about the pace of an 8B model on one GPU: for each turn whether the
    draft served it, and the seconds of all answers (the target has the prompt's KV). `kept`: tokens of conversations
    that the draft keeps; `pause`: seconds between two turns."""
    target = DevicePace(steps=((1, 0.047), (8, 0.060), (16, 0.080)), prefill_rate=1e6)
    draft = DevicePace(steps=((1, 0.005), (16, 0.006)), prefill_rate=1500.0)
    language = ModelledLanguage(AcceptanceModel(accept=0.6))
    simulation = modelled_pipeline(
        Options(strategy=strategy, placement="shared"),
        language,
        replace(ONE_GPU, target=target, draft=draft),
        kept=None,
    )
    if "draft" in simulation.own:
        simulation.remove(simulation.own["draft"])
        simulation.build = lambda _: ModelledDraft(language, draft, kept=kept)
        simulation.start("draft")
    decode(simulation, 1, prompt=1500)
    prompt, served, seconds = tuple(range(3, 3 + first)), [], 0.0
    for turn in range(turns):
        simulation.run_until(simulation.now + pause)
        began, before = simulation.now, len(simulation.history)
        id = simulation.submit(turn + 2, answer, prompt=prompt)
        simulation.run()
        client = simulation.clients[id]
        assert client.tokens == client.reference
        served.append(bool(sent(simulation, Extend, before)))
        seconds += simulation.now - began
        prompt = (*prompt, *client.tokens, *range(300))
    return served, seconds


def test_a_draft_reads_a_conversation_between_its_turns():
    """What it holds need not be read again, and what it was not worth reading for one answer is read behind it."""
    _, plain = conversation("ar", 0)
    served, adaptive = conversation("adaptive", kept=1 << 20)

    # That more turns follow is known after the second.
    assert served == [False, False, True, True, True, True, True, True]
    assert adaptive < 0.85 * plain


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kept", "pause"), [(0, 3.0), (1 << 20, 0.0)])
def test_a_conversation_that_is_not_kept_or_has_no_pauses_costs_nothing(kept: int, pause: float):
    _, plain = conversation("ar", 0)  # without a draft a pause changes nothing
    served, adaptive = conversation("adaptive", kept=kept, pause=pause)

    assert sum(served) <= 1
    assert adaptive < (1.01 if kept else 1.05) * plain


PROCESSOR = replace(
    ONE_GPU,
    target=DevicePace(steps=((1, 0.033), (2, 0.037), (4, 0.048), (8, 0.060), (16, 0.080)), prefill_rate=400.0),
    draft=DevicePace(steps=((1, 0.009), (16, 0.014)), prefill_rate=1000.0),
)
"""About the default pair's costs on two cores."""


@pytest.mark.parametrize("requests", [1, 8])
def test_requests_that_share_a_forward_are_drafted_only_if_that_pays_for_reading_their_prompts(requests: int):
    def duration(strategy: str) -> tuple[float, int]:
        simulation = decoded(PROCESSOR, 0.7, placement="shared", strategy=strategy)
        began, before = simulation.now, len(simulation.history)
        for number in range(2, 2 + requests):
            simulation.submit(number, 64, prompt=tuple(range(number, number + 100)))
        simulation.run()
        return simulation.now - began, len(sent(simulation, Start, before))

    (plain, _), (adaptive, starts) = duration("ar"), duration("adaptive")

    assert adaptive < 1.02 * plain
    assert starts == (requests == 1)


def test_prompts_are_read_no_more_where_asking_has_not_paid():
    simulation = decoded(PROCESSOR, 0.3, placement="shared")
    before = len(simulation.history)
    for number in range(2, 6):
        simulation.submit(number, 64, prompt=tuple(range(number, number + 100)))
        simulation.run()

    assert sent(simulation, Start, before) == []


def reading_little(accept: float, strategy: str) -> Simulation:
    """The default pair's costs on two cores: each further row reads the context again, and the draft sees 256 tokens.

    Requests with short prompts were served before."""
    target = structs.replace(PROCESSOR.target, prefill_rate=600.0, context_seconds=2e-6, vector_queries=64)
    draft = DevicePace(steps=((1, 0.0055), (16, 0.009)), prefill_rate=3300.0)
    devices = replace(PROCESSOR, target=target, draft=draft)
    simulation = decoded(devices, accept, tokens=1, placement="shared", strategy=strategy)
    if "draft" in simulation.own:
        simulation.remove(simulation.own["draft"])
        simulation.build = lambda _: ModelledDraft(simulation.language, draft, 256)
        simulation.start("draft")
    for number in range(2, 6):
        decode(simulation, number, prompt=80, tokens=100)
    return simulation


@pytest.mark.parametrize(
    ("accept", "prompt", "tokens", "least"),
    [(0.2, 80, 16, 0.98), (0.2, 800, 16, 0.98), (0.2, 800, 300, 0.95), (0.45, 800, 16, 0.92), (0.45, 800, 64, 1.03)],
)
def test_in_turns_a_request_is_hardly_slower_than_plain_decoding(accept: float, prompt: int, tokens: int, least: float):
    def duration(strategy: str) -> float:
        simulation = reading_little(accept, strategy)
        begun = simulation.now
        prefill = sum(decode(simulation, number, prompt, tokens).prefill_seconds for number in range(6, 9))
        return simulation.now - begun - prefill

    assert duration("ar") > least * duration("adaptive")


def test_behind_long_prompts_plain_rounds_are_tried_and_found_faster():
    simulation = reading_little(0.35, "adaptive")
    rounds = [decode(simulation, number, prompt=7000, tokens=100).rounds for number in range(6, 10)]

    assert rounds[-1] > 90


def attach(simulation: Simulation, accept: float) -> int:
    """A draft on a device of its own."""
    draft = ModelledDraft(ModelledLanguage(AcceptanceModel(accept=accept), draft=(1,)), DRAFT)
    return simulation.attach(draft).incarnation


def test_a_resting_draft_does_not_count_as_silent(monkeypatch: pytest.MonkeyPatch):
    """It is seldom worth a request, and would be replaced by the worse one."""
    failed = []
    monkeypatch.setattr(Election, "active_failed", lambda _: failed.append(True))
    simulation = in_turns(0.3)
    worse, own = attach(simulation, 0.1), simulation.own["draft"]
    for number in range(2, 6):
        simulation.submit(number, 300)
        simulation.run()

    assert not failed
    assert simulation.machine.drafts.statuses() == {own: "active", worse: "standby"}


@pytest.mark.thorough
def test_a_draft_that_rested_grows_by_itself_on_trial():
    """Only the active draft is asked for steps. It lost, and is compared again later."""
    simulation = in_turns()
    better, own = attach(simulation, 0.95), simulation.own["draft"]
    statuses, rounds = simulation.machine.drafts.statuses, 0
    while rounds < 48 or statuses()[own] != "standby":
        if not simulation.live:
            simulation.submit(len(simulation.clients) + 1, 300)
        compared = statuses()[own] == "on trial" and simulation.machine.drafts.mode in COMPARING
        before = len(simulation.history)
        simulation.advance()
        plans = [rests(reroot) for _, draft, reroot in sent(simulation, Reroot, before) if draft == own and compared]
        assert not any(plans)
        rounds += len(plans)

    assert statuses()[better] == "active"


class FruitlessDraft(ModelledDraft):
    """Answers each request for a step with no node."""

    def handle(self, message: ToWorker) -> Work:
        if not isinstance(message, Extend):
            return super().handle(message)
        return Work((Grow(message.request, message.round, (), (), (), evaluated=1, seconds=STEP),), STEP)


def test_a_draft_that_answers_requests_with_nothing_holds_no_round_up_for_long():
    simulation = in_turns()
    simulation.remove(simulation.own["draft"])
    simulation.build = lambda _: FruitlessDraft(simulation.language, DRAFT)
    simulation.start("draft")
    began = simulation.now
    simulation.submit(2, 20)
    simulation.run_until(began + 30.0)

    assert not simulation.live
    asked = [(at, extend.round) for at, extend in requests(simulation) if at > began]
    waits = [at - min(first for first, other in asked if other == round) for at, round in asked]
    assert max(waits) < 0.25


def test_growth_that_arrives_after_the_stop_changes_nothing():
    """The draft would seem to be at work, and would be waited for."""
    simulation = in_turns()
    sequence = simulation.submit(2, 200)
    machine, draft = simulation.machine, simulation.own["draft"]
    while machine.requests[sequence].round < 20:
        simulation.advance()
    for _ in range(32):
        machine.requests[sequence].estimates.gate.observe(guessed=False)
    while machine.requests[sequence].speculation.drafting:
        simulation.advance()
    late = Grow(sequence, machine.requests[sequence].round, (), (), (), evaluated=1, seconds=0.0)
    simulation.receive("draft", draft, late)

    assert not machine.requests[sequence].speculation.drafting


# In turns as fast as the best fixed plan ---------------------------------------------------------


CORES_TARGET = DevicePace(steps=((1, 0.053), (2, 0.057), (4, 0.067), (8, 0.079), (16, 0.115)), prefill_rate=300.0)
CORES_DRAFT = DevicePace(steps=((1, 0.007), (8, 0.009), (16, 0.012)), prefill_rate=2000.0)
CORES = Devices(target=CORES_TARGET, draft=CORES_DRAFT, baseline_draft=CORES_DRAFT, slow_down=2.0)
TOKENS = 200


def fixed(steps: int, nodes: int) -> type[Adaptive]:
    """Always so many growth steps, then the best so many nodes."""

    class Fixed(Adaptive):
        def decide(self, requests: Sequence[Request], now: float) -> list[Decision]:
            (request,) = requests
            draft = request.speculation
            ready = draft.drafting and draft.ready_at <= now < request.ready_since + 0.2
            if ready and draft.steps < steps:
                return [WaitUntil(now + 0.2, draft.steps + 1 if draft.resting else None)]
            deepest = request.tree.root.depth + request.room
            return [VerifyNodes([node for node in islice(request.tree.best(), nodes) if node.depth <= deepest])]

    return Fixed


def rate(accept: float, strategy: str = "adaptive") -> float:
    """Tokens a second of the third of three requests, whose figures are learned."""
    language = ModelledLanguage(AcceptanceModel(accept=accept, exponent=0.6, spread=1.5))
    options = Options(strategy=strategy, lookup="off", placement="shared")
    simulation = modelled_pipeline(options, language, CORES, kept=None)
    for number in (1, 2, 3):
        simulation.submit(number, TOKENS)
        began = simulation.now
        simulation.run()
    return TOKENS / (simulation.now - began)


@pytest.mark.thorough
@pytest.mark.parametrize("accept", [0.37, 0.5, 0.75])
def test_the_rule_reaches_the_best_fixed_plan(accept: float, monkeypatch: pytest.MonkeyPatch):
    found, plain = rate(accept), rate(accept, "ar")
    plans = []
    for steps, nodes in product((1, 2, 3), (1, 2, 4, 7)):
        monkeypatch.setitem(STRATEGIES, "adaptive", fixed(steps, nodes))
        plans.append(rate(accept))

    assert found >= 0.95 * max(plans)
    assert found > 1.05 * plain


def test_a_draft_that_is_never_right_costs_next_to_nothing():
    assert rate(0.0) >= 0.98 * rate(0.0, "ar")


@pytest.mark.parametrize(("step", "deeper", "tried"), [(0.018, 1.0, False), (0.009, 0.5, False), (0.009, 1.0, True)])
def test_turns_are_not_tried_where_a_plain_forward_gives_more_than_a_step_can(step: float, deeper: float, tried: bool):
    turns, cost = TurnTaking(), WidthCost()
    cost.observe(1, 0.016)
    found = False
    for _ in range(1000):
        turns.observe(MeasuredRound(1.0, 0.017, 1, 0.016), cost, step, deeper)
        found = found or not turns.settled
    assert found == tried


# What asking brings -------------------------------------------------------------------------------


def asked(rounds: int, tokens: Sequence[int]) -> Asked:
    """Rounds that gave these tokens in turn and took 25 ms, where verifying at once gives 1.5 in 20 ms."""
    found = Asked()
    for number in range(rounds):
        found.observe(tokens[number % len(tokens)], 0.025, Expected(0, 1.5, 0.02))
    return found


def test_asking_is_worth_its_tokens_less_those_of_the_same_time_and_more_while_few_rounds_tell():
    assert not asked(15, [2]).known
    assert asked(16, [2]).surplus(50.0) == pytest.approx(0.5 - 50.0 * 0.005)
    few, many = asked(16, [1, 3]).surplus(50.0), asked(512, [1, 3]).surplus(50.0)
    assert 0.3 < many < 0.45
    assert 0.5 < few < 0.75
