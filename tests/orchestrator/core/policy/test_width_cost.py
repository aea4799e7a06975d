"""What a forward costs by its width: the worker's measurements, corrected by observations."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.core.drafts.history import costs_behind
from orchestrator.core.estimates import WidthCost
from orchestrator.core.events import Task, WorkerUp
from orchestrator.core.expected_rate import best_count
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.lab.simulate.acceptance import AcceptanceModel, Language, ModelledLanguage
from orchestrator.lab.simulate.devices import Devices
from orchestrator.lab.simulate.plan import GREEDY
from orchestrator.lab.simulate.worker_host import Work
from orchestrator.lab.simulate.workers import ModelledDraft, ModelledTarget, VirtualWorker, modelled_hello
from protocol.messages.base import Role
from protocol.messages.sampling import Sampling
from protocol.messages.worker import FromWorker, Prefilled, ToWorker, Verdict, Verify
from protocol.worker.pacing import DevicePace
from tests.support.scripted_simulation import DRAFT, TARGET
from tests.support.simulation import Simulation, modelled_pipeline

WIDTHS = range(1, 18)


def passes(width: int) -> float:
    """Seconds on a GPU whose kernels read the weights once for up to five rows, and more than twelve rows otherwise."""
    return 0.020 * (1.0 + 0.4 * ((width - 1) // 5) if width <= 12 else 2.5)


def measured(device: Callable[[int], float] = passes) -> WidthCost:
    return WidthCost([(width, device(width)) for width in WIDTHS])


def test_a_worker_that_claims_to_take_no_time_makes_no_cost_zero():
    cost = WidthCost()
    cost.observe(3, 0.0)

    assert min(cost(width) for width in WIDTHS) > 0.0


@pytest.mark.parametrize("observed", [(1,), (4,), (1, 5)])
def test_a_slower_machine_scales_every_width(observed: tuple[int, ...]):
    cost = measured()
    for _ in range(20):
        for width in observed:
            cost.observe(width, 1.7 * passes(width))

    assert [cost(width) for width in WIDTHS] == pytest.approx([1.7 * passes(width) for width in WIDTHS], rel=0.02)


def test_a_longer_context_adds_to_every_width_what_it_adds_to_the_observed_ones():
    cost, context = measured(), 0.015
    for _ in range(60):
        for width in (1, 5, 10):
            cost.observe(width, passes(width) + context)

    assert [cost(width) for width in (3, 6, 9, 12)] == pytest.approx(
        [passes(width) + context for width in (3, 6, 9, 12)], rel=0.06
    )


def test_a_width_that_costs_less_than_a_narrower_one_is_found():
    """With long contexts an attention kernel for many rows can be faster than the one for few rows."""
    cost = measured()
    for _ in range(40):
        cost.observe(8, 0.040)
        cost.observe(9, 0.032)

    assert cost(9) < 0.9 * cost(8)


@pytest.mark.parametrize(("paths", "nodes"), [([0.5] * 4 + [0.1] * 12, 4), ([0.7] * 9 + [0.3] * 7, 9)])
def test_the_rule_stops_at_the_corners(paths: list[float], nodes: int):
    """The root and 4 or 9 nodes: one more node costs another pass over the weights."""
    assert best_count(paths, measured(), 0.001)[0] == nodes


def test_an_unmeasured_width_costs_what_the_next_wider_one_does():
    cost = WidthCost([(1, 0.02), (5, 0.03), (6, 0.04), (12, 0.05)])

    assert cost.known

    assert [cost(width) for width in (2, 5, 6, 7, 12)] == pytest.approx([0.03, 0.03, 0.04, 0.05, 0.05])
    assert cost(23) == pytest.approx(0.05 + 11 * 0.03 / 11)


def test_noise_and_one_cold_forward_do_not_hide_the_steps():
    cost, source = measured(), random.Random(5)
    cost.observe(1, 0.4)
    for _ in range(300):
        width = source.choice([1, 4, 5, 9, 10])
        cost.observe(width, passes(width) * source.uniform(0.9, 1.1))

    assert cost(6) > 1.2 * cost(5)
    assert cost(11) > 1.15 * cost(10)
    assert [cost(width) for width in (4, 5, 9, 10)] == pytest.approx(
        [passes(width) for width in (4, 5, 9, 10)], rel=0.05
    )


@given(
    costs=st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=20),
    seen=st.lists(st.tuples(st.integers(1, 1025), st.floats(0.0, 1e6)), max_size=60),
)
def test_whatever_a_worker_claims_costs_are_finite_and_not_negative(costs: list[float], seen: list[tuple[int, float]]):
    cost = WidthCost([(1 + 3 * index, seconds) for index, seconds in enumerate(costs)])
    for width, seconds in seen:
        cost.observe(width, seconds)

    assert all(0.0 <= cost(width) < 1e12 for width in (1, 2, 5, 17, 33, 1025))


def test_without_measurements_only_twice_the_observed_widths_are_told_and_one_more():
    cost, reaches = WidthCost(), list[float]()
    for width in (1, 3, 2, 7):
        cost.observe(width, 0.02 * width)
        reaches.append(cost.reach)

    assert WidthCost().reach == 3
    assert reaches == [3, 7, 7, 15]
    assert measured().reach == math.inf


class UnmeasuredTarget(ModelledTarget):
    """As on a processor: it states no costs, and its first two forwards copy the KV that the request took up."""

    def __init__(self, language: Language, pace: DevicePace) -> None:
        super().__init__(language, pace)
        self.hello = replace(self.hello, costs=(), context_costs=())
        self.widths = list[int]()

    def handle(self, message: ToWorker) -> Work:
        if isinstance(message, Verify):
            self.widths.append(len(message.tokens))
        return super().handle(message)

    def work(self) -> Work | None:
        work = super().work()
        if work is None or len(self.widths) > 2:
            return work
        return Work(tuple(map(self._behind_taken_up_kv, work.replies)), work.seconds + 0.5)

    def _behind_taken_up_kv(self, reply: FromWorker) -> FromWorker:
        match reply:
            case Prefilled():
                return replace(reply, tokens=0)
            case Verdict():
                return replace(reply, seconds=reply.seconds + 0.5)
            case _:
                return reply


@pytest.fixture
def first_answer() -> tuple[Simulation, UnmeasuredTarget]:
    """A pipeline that has answered its first request, with a draft that claims to be right and is."""
    language = ModelledLanguage(AcceptanceModel(accept=0.95))
    target = UnmeasuredTarget(language, TARGET)
    workers: dict[Role, VirtualWorker] = {"target": target, "draft": ModelledDraft(language, DRAFT)}
    simulation = Simulation(Options(lookup="off"), language, workers.__getitem__)
    for role in workers:
        simulation.start(role)
    simulation.submit(1, 30)
    simulation.run()
    return simulation, target


def test_a_target_that_states_no_costs_gets_wider_rounds_step_by_step_after_those_that_copy_kv(
    first_answer: tuple[Simulation, UnmeasuredTarget],
):
    _, target = first_answer
    # What the first two showed is not known yet.
    widest = [max(1, *target.widths[2:place], 1) for place in range(3, len(target.widths))]

    assert max(target.widths) > 3
    assert all(width <= 1 + 2 * most for width, most in zip(target.widths[3:], widest, strict=True))
    assert max(target.widths[:3]) <= 3


def test_behind_a_prompt_that_was_read_whole_the_first_forward_tells_what_one_token_costs():
    language = ModelledLanguage(AcceptanceModel(accept=0.95))
    simulation = modelled_pipeline(
        Options(lookup="off"), language, Devices(target=TARGET, draft=DRAFT, baseline_draft=DRAFT)
    )
    request = simulation.submit(1, 2)
    simulation.run()

    assert simulation.machine.drafts.estimates(simulation.clients[request].task, 1).target.observed


def test_a_worker_that_measured_replaces_what_its_predecessor_showed():
    cost = measured()
    for _ in range(50):
        cost.observe(5, 0.5)

    cost.expect(())
    continued = cost(5)
    cost.expect([(1, 0.010), (17, 0.012)])

    assert continued > 0.4
    assert cost(5) == pytest.approx(0.012)


def test_requests_begin_with_the_costs_in_the_hellos_of_both_workers_and_a_second_target_brings_its_own():
    machine, drafted = Machine(Options()), DevicePace(steps=((1, 0.004), (16, 0.012)), prefill_rate=4000.0)
    request = Task((1, 2), Sampling(), 5)
    bring_up(machine, TARGET, drafted)
    estimates = machine.drafts.estimates(request, 3)
    first, growth = [estimates.target(width) for width in WIDTHS], estimates.growth(16)
    bring_up(machine, DevicePace(steps=((1, 0.5),), prefill_rate=1.0), DRAFT)

    assert first == pytest.approx([TARGET.forward(width) for width in WIDTHS])
    assert growth == pytest.approx(drafted.forward(16))
    assert machine.drafts.estimates(request, 3).target(4) == pytest.approx(0.5)


LONG = replace(TARGET, context_seconds=5e-7, vector_queries=8)


@pytest.mark.parametrize(("prompt", "typical"), [(3, 0), (511, 0), (512, 1024), (5000, 4096), (20_000, 16_384)])
def test_requests_begin_with_what_their_context_adds_by_width(prompt: int, typical: int):
    """On Metal nine tokens read the KV like sixteen, and one like one: the widths do not move alike."""
    machine = Machine(Options())
    bring_up(machine, LONG, DRAFT)
    cost = machine.drafts.estimates(Task((1,), Sampling(), 5), prompt).target

    assert [cost(width) for width in WIDTHS] == pytest.approx([LONG.forward(width, typical) for width in WIDTHS])


def test_between_widths_whose_contexts_were_measured_lies_a_line_and_beyond_the_widest_none():
    told = replace(modelled_hello("target", pace=TARGET), context_costs=((1, 0.001), (8, 0.004), (9, 0.01)))

    added = [behind - alone for (_, behind), (_, alone) in zip(costs_behind(told, 2000), told.costs, strict=True)]
    assert added == pytest.approx([0.002 + 0.006 * step / 7 for step in range(8)] + [0.02] * 9)
    assert costs_behind(replace(told, context_costs=()), 2000) == list(told.costs)


def test_a_text_that_grows_long_is_decoded_by_the_costs_behind_long_contexts():
    language = ModelledLanguage(GREEDY, 0, prompt_tokens=400)
    simulation = modelled_pipeline(Options(), language, Devices(target=LONG, draft=DRAFT, baseline_draft=DRAFT))
    simulation.submit(1, 100)
    simulation.run()
    drafts, request = simulation.machine.drafts, next(iter(simulation.clients.values())).task
    assert drafts.estimates(request, 500).target.observed
    assert not drafts.estimates(request, 600).target.observed

    simulation.submit(1, 300)
    simulation.run()

    assert drafts.estimates(request, 600).target.observed
    assert not drafts.estimates(request, 3000).target.observed


def bring_up(machine: Machine, target: DevicePace, draft: DevicePace) -> None:
    incarnation = len(machine.workers())
    machine.step(WorkerUp(incarnation, modelled_hello("target", pace=target)), 0.0)
    machine.step(WorkerUp(incarnation + 1, modelled_hello("draft", pace=draft)), 0.0)


@pytest.mark.parametrize("second", [1.03, 1.2, 1.6])
def test_without_measurements_a_plain_forward_is_told_by_the_few_that_were_seen(second: float):
    """Most forwards are wider. Whatever another token costs, plain decoding must not seem dearer than it is."""
    source, cost = random.Random(3), WidthCost()

    def observe(forwards: int) -> None:
        for _ in range(forwards):
            width = 1 if cost.narrow_due else source.choice([2, 2, 2, 3])
            cost.observe(width, (1 + (second - 1) * (width - 1)) * source.gauss(0.030, 0.002))

    cost.observe(1, 0.030)
    cost.observe(1, 0.030)
    observe(8)
    assert cost(1) == pytest.approx(0.030, rel=0.15)
    observe(32)
    assert cost(1) == pytest.approx(0.030, rel=0.1)
    assert cost(2) == pytest.approx(second * 0.030, rel=0.1)
