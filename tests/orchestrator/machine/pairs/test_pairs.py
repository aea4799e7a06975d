"""Laws of recommended pairs: they go together, are measured against this machine, and are picked by one word."""

import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from orchestrator.cli.app import cli
from orchestrator.cli.commands import pairs as pairs_command
from orchestrator.cli.pipeline_options import draft_engine_option, pair_option
from orchestrator.machine.memory.kv_form import kv_form
from orchestrator.machine.pairs.recommended_pairs import beside, fits, kept_tokens, memory, pairs, published
from protocol.contracts.drafters.detection import read_drafter
from tests.support.models.drafter_files import FORMATS, write
from tests.support.models.shapes import configuration

GIB = 1 << 30
PAIR = pairs()["qwen2.5-3b"]


def test_the_draft_of_every_pair_is_smaller():
    for name, pair in published().items():
        assert pair.draft.parameters * 2 < pair.target.parameters, name
        assert pair.target.id.count("/") == pair.draft.id.count("/") == 1, name


def test_every_trained_drafter_has_its_facts_and_a_packaging_that_is_read(tmp_path: Path):
    read = {name: read_drafter(write(tmp_path / name, form())) for name, form in FORMATS.items()}
    forms = {(drafter.kind, drafter.format) for drafter in read.values() if drafter is not None}
    trained = {name: pair.draft for name, pair in published().items() if pair.draft.kind is not None}

    assert [name for name, draft in trained.items() if not (draft.size and draft.licence and draft.source)] == []
    assert [name for name, draft in pairs().items() if (draft.draft.kind or "", draft.draft.format) not in forms] == [
        name for name in pairs() if name not in trained
    ]


def test_every_target_of_the_list_has_a_drafter():
    """Those that people run on Macs."""
    named = ("Qwen3.8-27B", "Qwen3.6-35B-A3B", "Qwen3.5-4B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B")
    others = ("Llama-3.1-8B", "Llama-3.3-70B", "gemma-4", "gpt-oss-20b", "GLM-4.7-Flash", "LFM2.5", "Nemotron")
    for name in (*named, *others):
        assert any(name in pair.target.id and pair.draft.kind for pair in pairs().values()), name


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


@pytest.mark.parametrize(("gb", "working_set"), [(6, None), (18, 12.7), (24, 17.8)])
def test_the_list_says_what_fits_with_the_memory_that_macos_recommends(
    gb: int, working_set: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    available = None if working_set is None else int(working_set * GIB)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr(pairs_command, "memory_bytes", lambda: gb * GIB)
    monkeypatch.setattr(pairs_command, "gpu_working_set", lambda: available)
    monkeypatch.setattr(pairs_command, "computes_on_processor", lambda: False)
    monkeypatch.setattr(pairs_command, "pairs", lambda: {name: pairs()[name] for name in ("qwen2.5-3b", "qwen2.5-14b")})
    listed = json.loads(CliRunner().invoke(cli, ["pairs", "--json"], catch_exceptions=False).output)
    small, big = listed["pairs"]

    assert (small["name"], small["fits"]) == ("qwen2.5-3b", True)
    assert big["fits"] is (gb > 6)
    if available is not None:
        assert small["kept_tokens"] == kept_tokens(PAIR, False, available)


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
    # An engine without a model leaves the pair's draft alone.
    for engine, expected in (("coreml", draft), ("ngram", None), ("none", None)):
        assert run("--pair", "qwen2.5-3b", "--draft-engine", engine) == f"{target} {expected}"


def drafts(*words: str) -> str:
    run = CliRunner().invoke(cli, ["pairs", *words], catch_exceptions=False, env={"COLUMNS": "200"})
    assert run.exit_code == 0
    return run.output


def test_the_drafts_of_a_target_are_shown_with_their_licence_and_source():
    told = json.loads(drafts("--pair", "gemma4-12b-dflash", "--json"))
    by_name = {row["name"]: row for row in told["drafts"]}

    assert told["target"] == "mlx-community/gemma-4-12B-it-4bit"
    assert by_name.keys() == beside(published()["gemma4-12b-dflash"].target).keys()
    assert by_name["gemma4-12b-assistant"]["refused"]
    assert by_name["gemma4-12b-dspark-deepspec"]["licence"] == "not stated"

    shown = drafts("--pair", "gemma4-12b-dflash")
    assert "Not run: gemma4-12b-dspark-deepspec: its decoder layers are Gemma's" in shown
    assert all(row["source"] in shown for row in told["drafts"])


def test_a_name_that_no_pair_has_is_answered_with_the_nearest():
    run = CliRunner().invoke(cli, ["pairs", "--pair", "qwen3.8-27"])

    assert run.exit_code == 2
    assert "Did you mean 'qwen3.8-27b'?" in run.output
