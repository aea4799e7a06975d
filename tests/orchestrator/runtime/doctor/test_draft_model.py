"""What `doctor --draft` says: the kind, the layers that are tapped, the bytes a token, and whether it fits."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from draft_worker.drafter_examination import examine
from orchestrator.cli.app import cli
from orchestrator.runtime.doctor import models
from orchestrator.runtime.doctor.models import draft_finding, told
from protocol.contracts.drafters.detection import has_own_head, read_drafter
from tests.support.models.drafter_files import FORMATS, VOCABULARY, WIDTH, layer, write
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET


@pytest.fixture
def target(tmp_path: Path) -> Path:
    config, head = FORMATS["qwen_mtp"]()
    folder = write(
        tmp_path / "target",
        (config, head | layer("model.layers.0") | {"lm_head.weight": (VOCABULARY, WIDTH)}),
    )
    shutil.copy(DEMO_TARGET / "tokenizer.json", folder)
    return folder


def asked(*arguments: str) -> list[Any]:
    result = CliRunner().invoke(cli, ["doctor", "--json", *arguments])
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_kind_layers_and_bytes_are_told(tmp_path: Path):
    (found,) = asked("--draft", str(write(tmp_path / "drafter", FORMATS["specforge"]())))

    assert found["status"] == "ok"
    assert "drafter holds an EAGLE-3 drafter (SafeAILab format) for the draft engine eagle3." in found["text"]
    assert "the outputs of layers 0, 2, 5 (from 0) of the target, 96 bytes a token in 16 bits" in found["text"]
    assert "It drafts 24 of 40 tokens." in found["text"]


def test_beside_a_target_the_layers_are_known_and_the_fit(tmp_path: Path, target: Path):
    config, tensors = FORMATS["safeailab"]()
    folder = write(tmp_path / "drafter", (config, tensors | {"embed_tokens.weight": (VOCABULARY, WIDTH)}))
    alone, beside = draft_finding(str(folder)), draft_finding(str(folder), str(target))

    assert "3 outputs (a low, a middle and a high one) of the target" in alone.text
    assert "the outputs of layers 1, 3, 4 (from 0)" in beside.text
    assert beside.text.endswith("It fits this target.")


def test_a_drafter_that_does_not_fit_is_a_failure(tmp_path: Path):
    folder = write(tmp_path / "drafter", FORMATS["dspark"]())
    finding = draft_finding(str(folder), str(DEMO_TARGET))

    assert finding.status == "fail"
    assert "does not fit the target" in finding.text


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("dspark", "One forward guesses 7 tokens."),
        ("qwen_mtp", "the last output behind the final norm of the target, 32 bytes a token"),
        ("trained_exit", "It is the target's first 2 layers, and reads none of its states."),
    ],
)
def test_each_kind_is_told_in_its_own_words(tmp_path: Path, form: str, words: str):
    assert words in draft_finding(str(write(tmp_path / "drafter", FORMATS[form]()))).text


def test_an_ordinary_model_and_one_with_a_head_of_its_own(target: Path):
    assert "is a language model: it reads tokens alone" in draft_finding(str(DEMO_DRAFT)).text
    assert "It has an MTP head too" in draft_finding(str(target)).text
    drafter = read_drafter(target, with_own_head=True)
    assert drafter is not None
    assert "holds an MTP head (Qwen format)" in told(target, drafter, None)


def test_a_head_of_an_architecture_that_is_not_run_is_no_draft(target: Path):
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"model_type": "mimo"}))

    assert "MTP head" not in draft_finding(str(target)).text
    assert not has_own_head(target)


@pytest.mark.parametrize("name", ["exit", "exit:3"])
def test_an_exit_is_an_exit_of_a_target(name: str):
    finding = draft_finding(name)

    assert (finding.status, finding.text) == (
        "fail",
        f"{name} is the target's own first layers: name the target too (--target).",
    )
    assert "It is the target's first" in draft_finding(name, str(DEMO_TARGET)).text


@pytest.mark.parametrize(
    ("form", "options", "words"),
    [
        ("dflash", {"num_hidden_layers": 1}, "a tensor that its form does not know, layers.1."),
        ("safeailab", {"intermediate_size": 20}, "its tensor midlayer.mlp.gate_proj.weight has the shape (24, 16)"),
        ("speculators", {}, "its tensor layers.0.mlp.gate_proj.weight has the shape (24, 16)"),
    ],
)
def test_beside_a_target_what_only_loading_finds_is_a_failure(
    form: str, options: dict[str, Any], words: str, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
):
    """As `generate` would refuse it. The headers alone are in order."""
    config, tensors = FORMATS[form]()
    if form == "speculators":
        config["transformer_layer_config"] = config["transformer_layer_config"] | {"intermediate_size": 20}
    folder = write(tmp_path / "drafter", (config | options, tensors))
    monkeypatch.setattr(models, "_examination", lambda role, module, *arguments: examine(*arguments))

    assert draft_finding(str(folder)).status == "ok"
    finding = draft_finding(str(folder), str(target))
    assert (finding.status, words in finding.text) == ("fail", True), finding.text


def test_a_folder_that_mlx_vlm_split_from_a_checkpoint_is_named(tmp_path: Path):
    config, tensors = FORMATS["qwen_mtp"]()
    renamed = {name.removeprefix("mtp."): shape for name, shape in tensors.items()}
    split = {"model_type": "qwen3_5_mtp", "text_config": config}
    folder = write(tmp_path / "drafter", (split, renamed))

    assert "an MTP head in mlx-vlm's own packaging (qwen3_5_mtp)" in draft_finding(str(folder)).text


def test_a_damaged_drafter_is_a_failure_with_its_sentence(tmp_path: Path):
    config, tensors = FORMATS["dflash"]()
    folder = write(tmp_path / "drafter", (config, {"fc.weight": tensors["fc.weight"]}))

    assert draft_finding(str(folder)).status == "fail"
    assert "lacks the tensor layers.0.self_attn.k_proj.weight" in draft_finding(str(folder)).text
