"""What `plan` knows of trained drafters: a step in proportion to what it reads, and one forward for a whole block."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from orchestrator.cli.app import cli
from orchestrator.core.options import Options
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.devices import Devices
from orchestrator.lab.simulate.prediction.plan import Scenario, simulated
from orchestrator.lab.simulate.prediction.sweep import DRAFTERS, with_drafter
from orchestrator.lab.simulate.workers import ModelledDraft
from orchestrator.machine.profiles.device_profiles import load_profile
from protocol.contracts.drafters.description import KINDS, DrafterKind
from protocol.messages.base import NodeId, SequenceId
from protocol.messages.plans import BestFirst
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.worker.pacing import DevicePace

PACE = DevicePace(steps=((1, 0.010), (8, 0.012)), prefill_rate=1000.0)
SCENARIO = Scenario(devices=Devices.of(load_profile("m4-16gb-qwen2.5-3b")), requests=1, tokens=48)


def test_every_kind_is_known_with_its_source():
    assert DRAFTERS.keys() == KINDS.keys()
    assert all(drafter.source for drafter in DRAFTERS.values())


@pytest.mark.parametrize("kind", list(DRAFTERS))
def test_a_step_takes_the_share_of_the_target_s_time_that_it_reads(kind: DrafterKind):
    devices = with_drafter(SCENARIO, kind).devices
    share = DRAFTERS[kind].read / 7.57

    assert devices.draft.forward(1) == pytest.approx(share * devices.target.forward(1))
    assert 0.04 < share < 0.5


def grown(block: int, steps: int) -> list[float]:
    """Seconds of each of the first growth steps below one root, one node a step."""
    draft = ModelledDraft(ModelledLanguage(AcceptanceModel(accept=1.0), seed=1), PACE, block=block)
    plan = BestFirst(width=1, fan=1)
    draft.handle(Start(SequenceId(1), 0, (5,), NodeId(9), Sampling(), plan))
    works = [draft.work() for _ in range(steps)]
    return [0.0 if work is None else work.seconds for work in works]


def test_one_forward_guesses_a_block_and_the_next_block_needs_the_next():
    alone, block = grown(1, 8), grown(4, 8)

    assert all(seconds == pytest.approx(0.010) for seconds in alone)
    assert [seconds > 0.005 for seconds in block] == [True, False, False, False, True, False, False, False]


def test_tokens_stay_the_target_s_and_a_block_is_faster_than_its_guesses_one_by_one():
    block = with_drafter(SCENARIO, "dflash")
    one = Scenario(
        devices=Devices(
            target=block.devices.target,
            draft=block.devices.draft,
            baseline_draft=block.devices.baseline_draft,
            slow_down=block.devices.slow_down,
        ),
        acceptance=block.acceptance,
        requests=1,
        tokens=48,
    )

    assert simulated(block, "sd").tokens_per_second > simulated(one, "sd").tokens_per_second


@pytest.mark.thorough
def test_the_command_says_where_the_acceptance_comes_from_and_takes_a_given_one():
    arguments = ["plan", "--drafter", "eagle3", "--temperature", "0", "--tokens", "16", "--requests", "1", "--json"]
    told = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    given = CliRunner().invoke(cli, [*arguments, "--accept", "0.5"], catch_exceptions=False)

    assert "DSpark's paper" in told.stderr
    assert json.loads(told.stdout)["plans"][0]["acceptance"] == 0.64
    assert json.loads(given.stdout)["plans"][0]["acceptance"] == 0.5


def test_a_block_drafter_in_turns_is_not_given_up_just_before_its_forward_ends():
    """Most of its steps take no time, so the mean step is short; every seventh is a forward."""
    mac = Devices.of(load_profile("m4-pro-qwen3.8-27b"))
    block = Scenario(
        devices=replace(mac, draft=mac.baseline_draft, slow_down=1.0, draft_block=7),
        acceptance=AcceptanceModel(accept=0.926, exponent=1.0, spread=2.14),
        options=Options(placement="shared", lookup="off"),
        requests=1,
        tokens=192,
    )

    assert simulated(block, "adaptive").tokens_per_round > 2.7
