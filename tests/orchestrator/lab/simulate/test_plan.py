"""Laws of the planner: predictions, the command's output, and agreement with published measurements."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from orchestrator.cli.commands.plan import plan
from orchestrator.core.options import Options
from orchestrator.lab.calibration import to_toml
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.devices import Devices, Wires
from orchestrator.lab.simulate.plan import (
    BASELINE_NAME,
    COOL,
    GREEDY,
    ORACLE,
    PLAIN_NAME,
    SAMPLED,
    Prediction,
    Scenario,
    Worth,
    agreement,
    by_acceptance,
    oracle,
    predict,
    simulated,
    turn_taking,
)
from orchestrator.machine.profiles.device_profiles import calibration_file, load_profile, profile_names
from protocol.errors import InputError
from protocol.worker.pacing import DevicePace
from tests.support.simulation import Wire

M4 = Devices.of(load_profile("m4-16gb-qwen2.5-3b"))
AT_ONCE = Wires(Wire(delay=0.0), Wire(delay=0.0))


def scenario(**changes):
    return Scenario(**{"devices": M4, "tokens": 120, "requests": 1, **changes})


def test_a_target_whose_draft_guesses_badly_and_grows_beside_it_hardly_waits():
    predicted = simulated(scenario(acceptance=replace(SAMPLED, accept=0.44), temperature=0.7, requests=2), "adaptive")

    assert predicted.target_busy is not None
    assert predicted.target_busy > 0.94


def speeds(predictions):
    return {prediction.contender: prediction.tokens_per_second for prediction in predictions}


def slow_but_one(profile: str, acceptance: AcceptanceModel) -> Any:
    """Each takes seconds; the others run behind the marker."""
    first = profile == "m4-16gb-qwen2.5-3b" and acceptance is SAMPLED
    name = "sampled" if acceptance is SAMPLED else "greedy"
    return pytest.param(profile, acceptance, id=f"{name}-{profile}", marks=[] if first else [pytest.mark.slow])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("profile", "acceptance"), [slow_but_one(name, kind) for name in profile_names() for kind in (GREEDY, SAMPLED)]
)
def test_every_strategy_and_baseline_is_predicted(profile, acceptance):
    devices = Devices.of(load_profile(profile))
    temperature = 1.0 if acceptance is SAMPLED else 0.0
    reached = speeds(predict(scenario(devices=devices, acceptance=acceptance, temperature=temperature)))

    names = [name for name in reached if not name.startswith(BASELINE_NAME)]
    assert names == [PLAIN_NAME, "ar", "sd", "ssd", "adaptive", ORACLE]
    assert reached[PLAIN_NAME] == pytest.approx(1 / devices.target.forward(1))
    assert reached["ar"] < reached["adaptive"] <= 1.05 * reached[ORACLE]


@pytest.mark.parametrize(("block", "forwards"), [(1, 3), (2, 2), (8, 1)])
def test_turn_taking_on_one_device_reaches_its_closed_form(block: int, forwards: int):
    accept, depth, devices = 0.7, 3, replace(M4, block=block)
    language = ModelledLanguage(AcceptanceModel(accept=accept), seed=2)
    reached = turn_taking(devices, agreement(language, None), depth, request=1, first=0, tokens=20_000)

    tokens = (1 - accept ** (depth + 1)) / (1 - accept)
    seconds = forwards * M4.baseline_draft.forward(block) + M4.target.forward(1 + depth)
    assert reached.tokens / reached.rounds == pytest.approx(tokens, rel=0.02)
    assert reached.seconds / reached.rounds == pytest.approx(seconds, rel=0.01)
    assert turn_taking(devices, agreement(language, None), 6, request=1, first=0, tokens=101).tokens == 101


def test_independent_draws_agree_with_the_stated_probability():
    chances = AcceptanceModel(accept=0.3, spread=1.0)
    agrees = agreement(ModelledLanguage(AcceptanceModel(accept=0.9)), chances)
    share = sum(agrees(1, position) for position in range(4000)) / 4000

    assert share == pytest.approx(0.3, abs=0.03)


@pytest.mark.thorough
def test_a_baseline_whose_acceptance_is_unknown_is_left_out():
    unknown = scenario(acceptance=AcceptanceModel(accept=0.6), temperature=1.0)

    assert not any(name.startswith(BASELINE_NAME) for name in speeds(predict(unknown)))


@pytest.mark.thorough
def test_better_drafts_are_worth_more_and_at_once_no_more_than_one_that_takes_no_time():
    for heat, model in ((0.0, GREEDY), (0.7, COOL)):
        found = by_acceptance(scenario(acceptance=model, temperature=heat, tokens=200))
        speeds = [
            [one.tokens_per_second for one in row[1:] if isinstance(one, Prediction)] for row in found if row.baseline
        ]

        assert [row.accept for row in found] == [0.5, 0.6, 0.7, 0.8, 0.9]
        assert all(sorted(column) == list(column) for column in zip(*speeds, strict=True))
        assert all(at_once < bound for *_, at_once, bound in speeds)
        assert speeds[0][-2] > 1.05 / M4.target.forward(1)


def test_a_block_drafter_guesses_a_block_in_one_forward():
    devices = replace(M4, draft=msgspec.structs.replace(M4.draft, slow_down=3.0))
    one, eight = (
        simulated(scenario(devices=replace(devices, block=block), acceptance=replace(GREEDY, accept=0.9)), "adaptive")
        for block in (1, 8)
    )

    assert eight.tokens_per_second > 1.2 * one.tokens_per_second


PUBLISHED = {4: 210.9, 5: 193.6, 6: 175.3, 7: 158.6}
"""Tokens/s of ssd by K with 3 guesses a position, from an independent reproduction (docs/lab/planning.md)."""
PUBLISHED_SD = 141.4
"""Of sd at K = 4."""
FITTED = AcceptanceModel(accept=0.757, exponent=1.4)
"""a gives the published sd at K = 4, r then the published ssd at K = 4; the other rows are predicted."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("strategy", "depth", "speed", "within"),
    [
        ("ar", 4, 97.4, 0.001),
        ("sd", 4, PUBLISHED_SD, 0.01),
        *(("ssd", depth, speed, 0.01 if depth == 4 else 0.03) for depth, speed in PUBLISHED.items()),
    ],
)
def test_the_fitted_rows_fit_and_the_other_published_ones_are_predicted(strategy, depth, speed, within):
    devices = Devices.of(load_profile("h100-qwen3-32b"))
    options = Options(draft_tokens=depth, fan_budget=3 * (depth + 1), fallback="neural")
    published = Scenario(devices=devices, wires=AT_ONCE, acceptance=FITTED, options=options, tokens=400, requests=4)

    assert simulated(published, strategy).tokens_per_second == pytest.approx(speed, rel=within)


def command(*arguments):
    return CliRunner().invoke(plan, ["--temperature", "0", *arguments])


@pytest.mark.thorough
def test_the_command_prints_the_strategies_and_drafts_of_other_acceptances(monkeypatch):
    monkeypatch.setattr("orchestrator.lab.simulate.plan._ACCEPTANCES", (0.75,))
    result = command()

    assert result.exit_code == 0
    assert [words in result.stdout for words in ("adaptive", "best guess right 81%", "75%")] == [True] * 3


def test_what_can_not_be_is_refused_in_a_sentence():
    assert command("--temperature", "-1").exit_code == 2
    error = command("--pace", "no-such-device").exception

    assert isinstance(error, InputError)
    assert "\n" not in str(error)


def test_json_is_of_what_was_measured_here_unless_another_profile_is_named(monkeypatch, tmp_path):
    names = (PLAIN_NAME, "ar", "adaptive")
    known = [Prediction(contender=name, tokens_per_second=9.0, tokens_per_round=1.0) for name in names]
    monkeypatch.setattr("orchestrator.cli.commands.plan.predict", lambda _: known)
    worth = [Worth(0.5, None, *known)]
    monkeypatch.setattr("orchestrator.cli.commands.plan.by_acceptance", lambda _: worth)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    unmeasured, file = json.loads(command("--json").stdout), calibration_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(to_toml(msgspec.structs.replace(load_profile("m4-qwen3-8b"), name="this-machine")))

    assert unmeasured["profile"] == "m4-16gb-qwen2.5-3b"
    (planned,) = unmeasured["plans"]
    assert (planned["accept"], planned["by_acceptance"][0]["at_once"]) == (GREEDY.accept, msgspec.to_builtins(known[1]))
    assert planned["predictions"] == msgspec.to_builtins(known)
    assert json.loads(command("--json").stdout)["profile"] == "this-machine"
    assert json.loads(command("--json", "--pace", "m4-qwen3-8b").stdout)["profile"] == "m4-qwen3-8b"


@pytest.mark.thorough
def test_a_draft_that_pauses_slows_the_target_down_less():
    """Where tokens are dear, the draft pauses: the prediction lies between those of no and of constant overlap."""
    pace = DevicePace(steps=((1, 0.08), (2, 0.1), (16, 0.2)), prefill_rate=1000.0)
    draft = DevicePace(steps=((1, 0.004),), prefill_rate=1000.0)
    devices = Devices(target=pace, draft=draft, baseline_draft=draft, slow_down=1.4)
    scenario = Scenario(devices=devices, acceptance=AcceptanceModel(accept=0.4), tokens=150, requests=1)
    apart = simulated(replace(scenario, devices=replace(devices, slow_down=1.0)), "adaptive")
    slowed = replace(devices, target=msgspec.structs.replace(pace, slow_down=1.4), slow_down=1.0)
    constant = simulated(replace(scenario, devices=slowed), "adaptive")
    paused = simulated(scenario, "adaptive")

    assert apart.draft_busy is not None
    assert apart.draft_busy < 0.9
    assert 1.02 * constant.tokens_per_second < paused.tokens_per_second < 0.99 * apart.tokens_per_second


@pytest.mark.thorough
def test_the_bound_of_a_draft_that_takes_no_time_is_a_bound_where_a_draft_at_work_slows_the_target_down():
    """The policy avoids the slow-down by resting, so a bound that always had it would be none."""
    scenario = Scenario(devices=M4, acceptance=AcceptanceModel(accept=0.6), tokens=100, requests=1)
    slowed = replace(scenario, devices=replace(M4, slow_down=2.0))

    assert oracle(slowed) == oracle(replace(scenario, devices=replace(M4, slow_down=1.0)))
    assert simulated(slowed, "adaptive").tokens_per_second < oracle(slowed).tokens_per_second
