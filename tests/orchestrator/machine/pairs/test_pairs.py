"""Laws of recommended pairs: they go together, are measured against this machine, and are picked by one word."""

import json
import shutil
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from orchestrator.cli.app import cli
from orchestrator.cli.commands import pairs as pairs_command
from orchestrator.cli.pipeline_options import draft_engine_option, pair_option
from orchestrator.lab.bench.shapes import configuration
from orchestrator.lab.calibration.calibrate import to_toml
from orchestrator.lab.simulate.devices import Devices
from orchestrator.lab.simulate.prediction import gains as simulated
from orchestrator.lab.simulate.prediction.pair_plan import guess, plan_pair
from orchestrator.lab.simulate.prediction.plan import Scenario, plain
from orchestrator.lab.simulate.prediction.plan import simulated as predicted
from orchestrator.machine.memory.kv_form import kv_form
from orchestrator.machine.pairs.expectations import fits, forecast, gains, kept_tokens, memory, tokenizers
from orchestrator.machine.pairs.profile_choice import profile_for
from orchestrator.machine.pairs.recommended_pairs import Chains, beside, pairs, published
from orchestrator.machine.profiles.device_profiles import DeviceProfile, load_profile, parse_profile
from protocol.contracts.drafters.detection import read_drafter
from tests.support.models.drafter_files import FORMATS, write
from tests.support.paths import ROOT

GIB = 1 << 30
PAIR = pairs()["qwen2.5-3b"]


def test_every_pair_shares_a_vocabulary_and_its_draft_is_smaller():
    for name, pair in published().items():
        # A trained drafter has its target's vocabulary, and in 16 bits may be as big as its target in 4 bits.
        assert pair.draft.kind is not None or pair.target.tokenizer == pair.draft.tokenizer, name
        assert (pair.draft.active or pair.draft.parameters) * 2 < pair.target.parameters, name
        assert pair.target.id.count("/") == pair.draft.id.count("/") == 1, name


def test_every_trained_drafter_has_its_facts_and_a_packaging_that_is_read(tmp_path: Path):
    read = {name: read_drafter(write(tmp_path / name, form())) for name, form in FORMATS.items()}
    forms = {(drafter.kind, drafter.format) for drafter in read.values() if drafter is not None}
    trained = {name: pair.draft for name, pair in published().items() if pair.draft.kind is not None}

    assert [name for name, draft in trained.items() if not (draft.size and draft.licence and draft.source)] == []
    assert [name for name, draft in pairs().items() if (draft.draft.kind or "", draft.draft.format) not in forms] == [
        name for name in pairs() if name not in trained
    ]
    for name, draft in trained.items():
        assert draft.active is None or draft.active <= draft.parameters, name
        assert draft.published is None or 1 < draft.published.tokens <= draft.published.guesses + 1, name


def test_every_target_of_the_list_has_a_drafter():
    """Those that people run on Macs."""
    named = ("Qwen3.8-27B", "Qwen3.6-35B-A3B", "Qwen3.5-4B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B")
    others = ("Llama-3.1-8B", "Llama-3.3-70B", "gemma-4", "gpt-oss-20b", "GLM-4.7-Flash", "LFM2.5", "Nemotron")
    for name in (*named, *others):
        assert any(name in pair.target.id and pair.draft.kind for pair in pairs().values()), name


def test_acceptance_follows_from_the_tokens_of_a_chain():
    half = Chains(tokens=1 + 0.5 + 0.25, guesses=2, on="coins")

    assert half.accept == pytest.approx(0.5, abs=1e-6)
    assert Chains(tokens=1.0, guesses=7, on="nothing").accept == pytest.approx(0.0, abs=1e-6)
    assert Chains(tokens=8.0, guesses=7, on="everything").accept == pytest.approx(1.0, abs=1e-6)


def test_a_pair_that_no_engine_runs_is_refused_with_its_reason():
    shown = CliRunner().invoke(cli, ["generate", "x", "--pair", "gemma4-31b-assistant"])

    assert shown.exit_code == 1
    assert "google/gemma-4-31B-it-assistant, can't be run yet: it reads the target's keys" in str(shown.exception)


def test_a_pair_fits_where_its_weights_leave_room():
    """Core ML takes the draft in fp16 once for each loaded function (coremltools issue 2351)."""
    assert [fits(PAIR, on_processor=False, available=gib * GIB) for gib in (6, 4, 2)] == [True, True, False]
    assert not fits(PAIR, on_processor=True, available=6 * GIB)
    assert not fits(PAIR, False, available=4 * GIB, core_ml=True)
    assert memory(PAIR, False) == pytest.approx((3.09 + 0.49) * 1e9 * 4.5 / 8 + GIB)
    assert memory(PAIR, False, core_ml=True) - memory(PAIR, False) == pytest.approx(3 * 0.49e9 * 2)


def _sizes(layers: int, kv_heads: int, head_size: int, **others: Any) -> dict[str, Any]:
    heads = {"num_attention_heads": kv_heads, "num_key_value_heads": kv_heads, "head_dim": head_size}
    return {"num_hidden_layers": layers, "hidden_size": head_size, **heads, **others}


_CONFIGURATIONS = {
    "smollm2-1.7b": _sizes(24, 32, 64),
    "smollm2-135m": _sizes(30, 3, 64),
    "qwen2.5-1.5b": _sizes(28, 2, 128),
    "qwen3-30b-a3b": _sizes(48, 4, 128),
    "qwen3-32b": _sizes(64, 8, 128),
    "gemma-3-1b": _sizes(26, 1, 256, sliding_window=512, sliding_window_pattern=6),
    "gemma-3-27b": _sizes(62, 16, 128, sliding_window=1024, sliding_window_pattern=6),
    "gpt-oss-120b": _sizes(36, 8, 64, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 18),
}
"""What their config.json files state of KV."""


def test_the_kv_of_models_is_that_of_their_layers_and_heads():
    """As the profiles of Macs, made from the same config.json files, and the shapes of the bench have them."""
    facts = resources.files("orchestrator.machine.profiles") / "apple_silicon.toml"
    known: dict[str, tuple[int, ...]] = {
        name: (2 * model["layers"] * model["kv_heads"] * model["head_size"],)
        for name, model in tomllib.loads(facts.read_text(encoding="utf-8"))["models"].items()
    }
    configurations = {name: configuration(name) for name in ("gemma-3-12b", "gpt-oss-20b", "qwen3-8b", "qwen3.8-27b")}
    for name, stated in (configurations | _CONFIGURATIONS).items():
        form = kv_form(stated)
        assert form is not None
        known[name] = tuple(form) if form.state else tuple(filter(None, form))

    models = [model for pair in pairs().values() for model in (pair.target, pair.draft) if model.kind is None]
    stated = {_plain_name(model.id): model.kv for model in models}

    checked = known.keys() & stated.keys()
    assert {name: stated[name] for name in checked} == {name: known[name] for name in checked}
    assert {name for name, kv in stated.items() if kv} == checked


def _plain_name(id: str) -> str:
    """Without its owner, and what tells of tuning and bits."""
    name = id.split("/")[1].lower().removeprefix("meta-")
    for part in ("-instruct", "-4bit", "-mxfp4-q4", "-it"):
        name = name.replace(part, "")
    return name.replace("llama-", "llama")


def test_a_pair_keeps_what_its_weights_leave():
    small, large = (kept_tokens(pairs()["qwen3-8b"], False, gib * GIB) for gib in (13, 48))

    assert small is not None
    assert large is not None
    assert 20_000 < small < large
    assert kept_tokens(pairs()["qwen3-8b"], False, 4 * GIB) is None
    assert kept_tokens(pairs()["lfm2-1.2b"], False, 64 * GIB) is None


def hub(folder: Path, tokenizer_changed: bool = False) -> Path:
    """A cache of Hugging Face's with the demo models under the names of the pair's."""
    for model, role in ((PAIR.target, "target"), (PAIR.draft, "draft")):
        repository = folder / f"models--{model.id.replace('/', '--')}"
        snapshot = repository / "snapshots" / "0123456789"
        shutil.copytree(ROOT / f"{role}_worker" / "demo_model", snapshot)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0123456789")
    if tokenizer_changed:
        file = snapshot / "tokenizer.json"
        content = json.loads(file.read_bytes())
        content["model"]["vocab"] = {text: 4095 - id for text, id in content["model"]["vocab"].items()}
        file.write_text(json.dumps(content))
    return folder


def test_tokenizers_are_compared_where_both_models_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, folder, expected in (
        ("none", tmp_path / "none", (True, False)),
        ("same", hub(tmp_path / "same"), (True, True)),
        ("other", hub(tmp_path / "other", tokenizer_changed=True), (False, True)),
    ):
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
        assert tokenizers(PAIR) == expected, name


def measured(target: float, draft: float) -> DeviceProfile:
    """A shipped profile as if it had been measured with so many times the pair's own weights."""
    profile = load_profile("m4-16gb-qwen2.5-3b")
    weights = round(PAIR.target.weights(False) * target), round(PAIR.draft.weights(False) * draft)
    return msgspec.structs.replace(
        profile,
        target=msgspec.structs.replace(profile.target, weights=weights[0]),
        draft=msgspec.structs.replace(profile.draft, weights=weights[1]),
    )


def test_a_forecast_grows_with_the_weights():
    same, half = forecast(PAIR, measured(1, 1), False), forecast(PAIR, measured(2, 2), False)

    assert same is not None
    assert half is not None
    assert same.plain == pytest.approx(1000 / 21.3, rel=0.01)
    assert half.plain == pytest.approx(2 * same.plain, rel=0.01)
    assert same.adaptive > 1.2 * same.plain
    assert forecast(PAIR, load_profile("m4-16gb-qwen2.5-3b"), False) is None


@pytest.mark.parametrize(("draft", "wide", "slow_down"), [(0, 2, 1), (3, 0, 0), (5, 4, 2)])
def test_the_shipped_gains_are_those_that_the_simulator_gives(draft: int, wide: int, slow_down: int):
    axes = gains().draft[draft], gains().wide[wide], gains().slow_down[slow_down]

    assert (gains().draft, gains().wide, gains().slow_down) == (simulated.DRAFT, simulated.WIDE, simulated.SLOW_DOWN)
    assert gains().times[draft][wide][slow_down] == pytest.approx(simulated.gain(*axes), rel=0.03)
    assert gains().at(*axes) == pytest.approx(gains().times[draft][wide][slow_down])


def test_a_forecast_is_about_what_plan_predicts():
    profile = measured(1, 1)
    scenario = Scenario(devices=Devices.of(profile), requests=1, tokens=128)
    expected = forecast(PAIR, profile, False)

    assert expected is not None
    assert expected.plain == pytest.approx(plain(scenario).tokens_per_second, rel=0.001)
    assert expected.adaptive == pytest.approx(predicted(scenario, "adaptive").tokens_per_second, rel=0.1)


def test_a_mixture_of_experts_reads_its_active_parameters_and_needs_memory_for_all():
    sparse = msgspec.structs.replace(PAIR, target=msgspec.structs.replace(PAIR.target, parameters=30.9, active=3.09))

    assert forecast(sparse, measured(1, 1), False) == forecast(PAIR, measured(1, 1), False)
    assert memory(sparse, False) - memory(PAIR, False) == pytest.approx(9 * PAIR.target.weights(False))


def test_nothing_is_forecast_from_a_pair_of_quite_another_size():
    assert forecast(PAIR, measured(1 / 300, 1), False) is None
    assert forecast(PAIR, measured(1, 30), False) is None

    slow = measured(1 / 15, 1)
    steps = tuple(msgspec.structs.replace(step, milliseconds=10 * step.milliseconds) for step in slow.target.steps)
    assert forecast(PAIR, slow, False) is not None
    assert (
        forecast(PAIR, msgspec.structs.replace(slow, target=msgspec.structs.replace(slow.target, steps=steps)), False)
        is None
    )


def test_a_calibration_keeps_what_weights_it_was_measured_with():
    profile = measured(1, 1)

    assert parse_profile(to_toml(profile), "written") == profile


def listed(monkeypatch: pytest.MonkeyPatch, folder: Path, calibration: Path, gib: int = 6) -> dict:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "none"))
    monkeypatch.setattr(pairs_command, "calibration_file", lambda: calibration)
    monkeypatch.setattr(pairs_command, "memory_bytes", lambda: gib * GIB)
    monkeypatch.setattr(pairs_command, "computes_on_processor", lambda: False)
    monkeypatch.setattr(pairs_command, "pairs", lambda: {name: pairs()[name] for name in ("qwen2.5-3b", "qwen2.5-14b")})
    return json.loads(CliRunner().invoke(cli, ["pairs", "--json"], catch_exceptions=False).output)


@pytest.mark.parametrize(("gb", "working_set"), [(18, 12.7), (24, 17.8)])
def test_a_mac_s_pairs_have_the_memory_that_macos_recommends(
    gb: int, working_set: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As a start there has."""
    monkeypatch.setattr(pairs_command, "gpu_working_set", lambda: int(working_set * GIB))
    small, _ = listed(monkeypatch, tmp_path, tmp_path / "none.toml", gb)["pairs"]

    assert small["kept_tokens"] == kept_tokens(pairs()["qwen2.5-3b"], False, int(working_set * GIB))


def test_the_list_says_what_fits_and_how_fast_it_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "this-machine.toml"
    assert "run `launch-pipeline calibrate`" in listed(monkeypatch, tmp_path, file)["advice"]

    file.write_text(to_toml(load_profile("m4-16gb-qwen2.5-3b")))
    assert "calibrate` again" in listed(monkeypatch, tmp_path, file)["advice"]

    file.write_text(to_toml(measured(1, 1)))
    small, big = listed(monkeypatch, tmp_path, file)["pairs"]
    assert (small["name"], small["fits"], small["tokenizers_match"]) == ("qwen2.5-3b", True, True)
    assert small["tokens_per_second"] > small["plain_tokens_per_second"] == pytest.approx(47, abs=1)
    assert (big["fits"], big["tokens_per_second"]) == (False, None)


@click.command()
@pair_option
@click.option("--target")
@click.option("--draft")
@draft_engine_option(optional=True)
def models(target: str | None, draft: str | None, draft_engine: str) -> None:
    click.echo(f"{target} {draft}")


def test_pair_names_both_models_and_gives_way_to_either():
    def run(*arguments: str, **defaults: str) -> str:
        found = CliRunner().invoke(models, arguments, default_map=defaults, catch_exceptions=False)
        return found.output.strip()

    target, draft = PAIR.target.id, PAIR.draft.id
    assert run() == "None None"
    assert run("--pair", "qwen2.5-3b") == f"{target} {draft}"
    assert run("--pair", "qwen2.5-3b", "--target", "mine") == f"mine {draft}"
    assert run("--pair", "qwen2.5-3b", target="from the file") == f"{target} {draft}"
    assert run("--draft", "mine", pair="qwen2.5-3b") == f"{target} mine"


@pytest.mark.parametrize(("engine", "draft"), [("coreml", PAIR.draft.id), ("ngram", None), ("none", None)])
def test_an_engine_without_a_model_leaves_the_pair_s_draft_alone(engine: str, draft: str | None):
    found = CliRunner().invoke(models, ["--pair", "qwen2.5-3b", "--draft-engine", engine], catch_exceptions=False)

    assert found.output.strip() == f"{PAIR.target.id} {draft}"


BIG = pairs()["qwen3.8-27b"]


def test_a_plan_follows_the_draft_s_bytes_and_its_acceptance():
    profile = load_profile("m4-pro-qwen3.8-27b")
    better, lighter = (
        msgspec.structs.replace(BIG, draft=msgspec.structs.replace(BIG.draft, **change))
        for change in ({"published": Chains(tokens=7.0, guesses=7, on="a test")}, {"active": 0.4, "head": 0.0})
    )
    usual, good, light = (plan_pair(pair, profile, on_processor=False) for pair in (BIG, better, lighter))

    assert usual is not None
    assert good is not None
    assert light is not None
    assert usual.plain == pytest.approx(15.5, rel=0.01)
    assert 1.3 < usual.gain < 2.5
    assert good.gain > usual.gain + 0.3
    assert good.tokens_per_round > usual.tokens_per_round
    assert light.gain > usual.gain + 0.1


def test_nothing_is_planned_for_a_target_of_quite_another_size():
    assert plan_pair(BIG, measured(1 / 300, 1), on_processor=False) is None
    assert plan_pair(BIG, load_profile("m4-16gb-qwen2.5-3b"), on_processor=False) is None


def test_an_acceptance_says_whether_others_measured_it():
    told = {name: guess(pair.draft) for name, pair in beside(BIG.target).items()}

    assert told["qwen3.8-27b"] == (
        pytest.approx(0.795, abs=0.001),
        True,
        "4.1 tokens a round of 7 guesses, MT-Bench, the model's own sampling",
    )
    assert not told["qwen3.8-27b-dspark"].published
    assert not guess(PAIR.draft).published


def test_the_profile_is_this_machine_s_if_it_fits_then_this_chip_s_then_any():
    here, small = measured(1, 1), PAIR.target

    assert profile_for(small, here, "Apple M4")[:2] == (here, "this machine")
    assert profile_for(BIG.target, None, "Apple M3 Max")[1:2] == ("this chip",)
    assert profile_for(BIG.target, None, "Apple M3 Max").profile.name == "m3-max-qwen3.8-27b"
    assert profile_for(small, None, "Apple M4").profile.name == "m4-qwen2.5-3b"
    stranger = profile_for(small, measured(1 / 300, 1), "AMD EPYC")
    assert stranger.of == "another machine"
    assert "was calibrated with a target of quite another size" in stranger.sentence
    assert "not for this machine. This machine was not calibrated" in profile_for(small, None, "AMD EPYC").sentence


def drafts(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str, width: int = 200) -> str:
    monkeypatch.setattr(pairs_command, "calibration_file", lambda: folder / "none.toml")
    monkeypatch.setattr(pairs_command, "chip", lambda: "AMD EPYC")
    run = CliRunner().invoke(cli, ["pairs", *words], catch_exceptions=False, env={"COLUMNS": str(width)})
    assert run.exit_code == 0
    return run.output


def test_the_drafts_of_a_target_are_shown_with_their_gain_and_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told = json.loads(drafts(monkeypatch, tmp_path, "--pair", "gemma4-12b-dflash", "--json"))
    by_name = {row["name"]: row for row in told["drafts"]}

    assert told["target"] == "mlx-community/gemma-4-12B-it-4bit"
    assert told["profile_of"] == "another machine"
    assert by_name.keys() == beside(published()["gemma4-12b-dflash"].target).keys()
    assert by_name["gemma4-12b-dflash"]["gain"] > 1.1
    assert (by_name["gemma4-12b-assistant"]["gain"], bool(by_name["gemma4-12b-assistant"]["refused"])) == (None, True)
    assert by_name["gemma4-12b-dspark-deepspec"]["licence"] == "not stated"

    shown = drafts(monkeypatch, tmp_path, "--pair", "gemma4-12b-dflash")
    assert "Planned for" in shown
    assert "not for this machine" in " ".join(shown.split())
    assert "Not run: gemma4-12b-dspark-deepspec: its decoder layers are Gemma's" in shown
    assert all(row["source"] in shown for row in told["drafts"])


def test_of_a_mixture_of_experts_it_is_said_that_the_gain_is_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sparse, dense = (drafts(monkeypatch, tmp_path, "--pair", name) for name in ("qwen3.6-35b-a3b", "qwen3.8-27b"))

    assert "expect less" in sparse
    assert "expect less" not in dense


def test_a_name_that_no_pair_has_is_answered_with_the_nearest():
    run = CliRunner().invoke(cli, ["pairs", "--pair", "qwen3.8-27"])

    assert run.exit_code == 2
    assert "Did you mean 'qwen3.8-27b'?" in run.output
