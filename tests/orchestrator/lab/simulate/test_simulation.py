"""Laws of the simulation: the real state machine, modelled workers, virtual time."""

import msgspec
import pytest

from orchestrator.core.options import Options
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.devices import Devices, Wires
from orchestrator.lab.simulate.worker_host import Contention, VirtualClock
from orchestrator.lab.simulate.workers import ModelledDraft, ModelledTarget
from protocol.messages.base import NodeId, RequestId
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.worker.pacing import DevicePace
from tests.support.simulation import Wire, WireDirection, modelled_pipeline

TARGET = DevicePace(steps=((1, 0.020), (4, 0.024), (16, 0.040)), prefill_rate=1000.0)
DRAFT = DevicePace(steps=((1, 0.005), (8, 0.006)), prefill_rate=2000.0)
NO_TIME = DevicePace(steps=((1, 1e-6),), prefill_rate=1e9)
DEVICES = Devices(target=TARGET, draft=DRAFT, baseline_draft=DRAFT)
WIRES = Wires()
AT_ONCE = Wires(Wire(delay=0.0), Wire(delay=0.0))


def run(strategy, acceptance, devices=DEVICES, wires=WIRES, tokens=150, requests=1, seed=0, **options):
    """Requests one after the other; the finished simulation."""
    language = ModelledLanguage(acceptance, seed=seed, prompt_tokens=16)
    simulation = modelled_pipeline(Options(strategy=strategy, **options), language, devices, wires, seed)
    for request in range(requests):
        simulation.submit(request, tokens)
        simulation.run()
    return simulation


def speed(simulation):
    """Tokens a second over all requests."""
    figures = [client.statistics for client in simulation.clients.values()]
    return sum(one.generated_tokens for one in figures) / sum(
        one.generated_tokens / one.tokens_per_second for one in figures
    )


def test_the_same_arguments_give_the_same_run():
    wires = Wires(Wire(jitter=0.01, loss=0.05), Wire(jitter=0.02, loss=0.1))
    acceptance = AcceptanceModel(accept=0.7, spread=1.0)
    first, second = (run("adaptive", acceptance, wires=wires, seed=5) for _ in range(2))

    assert first.clients == second.clients
    assert first.now == second.now


@pytest.mark.parametrize("delay", [0.0, 0.0003, 0.01])
def test_plain_decoding_takes_a_forward_and_a_hop_a_token(delay):
    wires = Wires(Wire(delay=delay), Wire(delay=delay))
    reached = speed(run("ar", AcceptanceModel(accept=0.5), wires=wires))

    assert reached == pytest.approx(1 / (TARGET.forward(1) + 2 * delay), rel=1e-9)


def test_turn_taking_reaches_its_closed_form():
    accept, depth = 0.75, 3
    wires = Wires(Wire(delay=0.001), Wire(delay=0.002))
    reached = speed(run("sd", AcceptanceModel(accept=accept), wires=wires, tokens=600, requests=4, draft_tokens=depth))

    tokens = (1 - accept ** (depth + 1)) / (1 - accept)
    # The draft hears of the new root and tells each token while the target waits.
    seconds = depth * DRAFT.forward(1) + TARGET.forward(1 + depth) + 2 * 0.001 + 2 * 0.002
    assert reached == pytest.approx(tokens / seconds, rel=0.05)


@pytest.mark.thorough
def test_a_perfect_draft_that_takes_no_time_reaches_the_bound():
    devices = Devices(target=TARGET, draft=NO_TIME, baseline_draft=NO_TIME)
    reached = speed(run("adaptive", AcceptanceModel(accept=1.0), devices=devices, wires=AT_ONCE, tokens=1000))

    bound = max((1 + nodes) / TARGET.forward(1 + nodes) for nodes in range(17))
    assert reached <= bound * (1 + 1e-9)
    assert reached >= 0.97 * bound


@pytest.mark.parametrize("boast", [0.0, 22.0], ids=["honest", "boasting"])
def test_a_useless_draft_costs_next_to_nothing(boast):
    """The honest one has nothing to grow and rests, so that waiting for it is all in vain."""
    useless = AcceptanceModel(accept=0.0, claim_shift=boast)
    plain, speculating = (speed(run(strategy, useless, tokens=600)) for strategy in ("ar", "adaptive"))

    assert speculating >= 0.97 * plain


def test_both_devices_are_slower_only_while_they_work_at_once():
    slow = Devices(target=TARGET, draft=DRAFT, baseline_draft=DRAFT, slow_down=1.5)
    acceptance = AcceptanceModel(accept=0.7)

    (client,) = run("adaptive", acceptance, devices=slow).clients.values()
    assert client.statistics is not None
    assert 0.8 < client.statistics.target_busy <= 1.0
    # In turns, only the prompts are prefilled at once.
    assert run("sd", acceptance, devices=slow).now == pytest.approx(run("sd", acceptance).now, rel=0.02)
    slower = Devices(
        target=msgspec.structs.replace(TARGET, slow_down=1.5),
        draft=msgspec.structs.replace(DRAFT, slow_down=1.5),
        baseline_draft=DRAFT,
    )
    assert run("ssd", acceptance).now < run("ssd", acceptance, devices=slow).now
    assert run("ssd", acceptance, devices=slow).now < run("ssd", acceptance, devices=slower).now


def test_units_of_work_share_a_chip():
    """The second one begins 1 s later: until 3 s both advance at half speed, then the rest of one at full speed."""
    clock, took = VirtualClock(), {}
    chip = Contention(clock, slow_down=2.0)
    chip.begin(2.0, lambda seconds: took.update(first=seconds))
    clock.at(1.0, lambda: chip.begin(3.0, lambda seconds: took.update(second=seconds)))
    while clock.next_at is not None:
        clock.advance()

    assert took == {"first": pytest.approx(3.0), "second": pytest.approx(4.0)}


def test_a_cancelled_request_ends():
    simulation = modelled_pipeline(Options(), ModelledLanguage(AcceptanceModel(accept=0.5)), DEVICES)
    id = simulation.submit(1, 10_000)
    simulation.clock.at(1.0, lambda: simulation.cancel(id))
    simulation.run()

    client = simulation.clients[id]
    assert client.reason == "cancelled"
    assert client.tokens == client.reference[: len(client.tokens)]
    assert 0 < len(client.tokens) < 10_000


def carried(wire, count=400):
    """Arrivals of messages that leave a second apart."""
    clock, arrived = VirtualClock(), []
    carrier = WireDirection(clock, wire, 7)
    for index in range(count):
        carrier.send(float(index), lambda index=index: arrived.append((index, clock.now)))
    while clock.next_at is not None:
        clock.advance()
    return arrived


def test_a_wire_keeps_the_order_and_loses_its_share_without_resending():
    arrived, lossy = carried(Wire(delay=0.5, jitter=3.0, loss=0.3, resend=2.0)), carried(Wire(loss=0.25, resend=None))

    assert [index for index, _ in arrived] == list(range(400))
    assert all(at >= index + 0.5 for index, at in arrived)
    assert len(lossy) / 400 == pytest.approx(0.75, abs=0.06)


def test_each_chunk_of_a_prompt_takes_the_device_s_time():
    language = ModelledLanguage(AcceptanceModel(accept=0.9), seed=3)
    start = Start(RequestId(1), 0, (7,) * 1025, NodeId(1), Sampling())
    for worker, pace in ((ModelledTarget(language, TARGET), TARGET), (ModelledDraft(language, DRAFT), DRAFT)):
        worker.handle(start)
        chunks = [worker.work(), worker.work()]

        assert [work and work.seconds for work in chunks] == pytest.approx([512 / pace.prefill_rate] * 2)
