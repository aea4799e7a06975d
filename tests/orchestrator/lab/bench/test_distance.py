"""A bench of drafts behind emulated links: options, contenders, picture."""

from dataclasses import replace

import pytest

from orchestrator.core.options import Options
from orchestrator.lab.bench.plan import BenchPlan, parse_links
from orchestrator.lab.bench.trials import entries
from orchestrator.lab.simulate.devices import Devices
from orchestrator.lab.simulate.prediction.plan import GREEDY, SAMPLED, Scenario, simulated
from orchestrator.lab.simulate.prediction.sweep import with_draft_delay
from orchestrator.machine.profiles.device_profiles import load_profile, worker_pace
from orchestrator.runtime.link_emulation import EmulatedLink
from protocol.errors import InputError

LINKS = (EmulatedLink(delay=0.0003, loss=0.01), EmulatedLink(delay=0.05, loss=0.01))


def plan(**options) -> BenchPlan:
    usual = {"target": None, "draft": None, "repeats": 1, "max_tokens": 8, "controls": False}
    return BenchPlan.of(draft_tokens="0", strategies="ar,adaptive", temperature=(0.0,), **(usual | options))


def test_delays_are_milliseconds():
    assert parse_links("0.3,50", 0.01) == LINKS
    assert parse_links(None, 0.01) == ()


@pytest.mark.parametrize("words", ["far", "-1", "0.3;2", "1e9"])
def test_an_invalid_delay_is_refused_with_a_sentence(words):
    with pytest.raises(InputError, match="names no link: give milliseconds"):
        parse_links(words, 0.0)


def test_every_strategy_with_a_draft_is_measured_at_every_distance():
    wanted = plan(link_delay="0.3,50", link_loss=0.01)
    links = {entry.line: entry.link for entry in entries(wanted)}

    distant = {"adaptive, 0.3 ms": LINKS[0], "adaptive, 50 ms": LINKS[1]}
    assert links == {"ar": None, "adaptive": None, **distant}


def test_a_link_is_slower_by_as_much_as_the_pace():
    slow = plan(link_delay="1", pace="m4-16gb-qwen2.5-3b@4")

    links = {entry.line: entry.link for entry in entries(slow)}

    assert links["adaptive, 1 ms"] == EmulatedLink(delay=0.004)


def test_machines_apart_do_not_slow_each_other_down():
    profile = load_profile("m4-16gb-qwen2.5-3b")
    near, far = (worker_pace(profile, "target", Options(), "mlx", apart=apart) for apart in (False, True))

    assert near is not None
    assert near.slow_down > 1.0
    assert far == worker_pace(profile, "target", Options(strategy="ar"), "mlx")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("acceptance", [GREEDY, SAMPLED, replace(SAMPLED, accept=0.02)], ids=["T = 0", "T = 1", "bad"])
@pytest.mark.parametrize("delay", [2.0, 50.0, 300.0])
def test_a_distant_draft_never_slows_the_target_down(delay, acceptance):
    """In virtual time, with 1% of the messages lost."""
    devices = Devices.of(load_profile("m4-16gb-qwen2.5-3b"))
    scenario = with_draft_delay(Scenario(devices=devices, acceptance=acceptance, tokens=120, requests=1), delay)
    wires = replace(scenario.wires, draft=replace(scenario.wires.draft, loss=0.01))
    plain, far = (simulated(replace(scenario, wires=wires), strategy) for strategy in ("ar", "adaptive"))

    assert far.tokens_per_second >= 0.97 * plain.tokens_per_second
