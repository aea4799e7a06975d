"""What `doctor --draft` and `doctor --target` say of a model, or what is wrong with it."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from click.testing import CliRunner

from draft_worker import drafter_examination
from draft_worker.__main__ import open_engine
from draft_worker.drafter_examination import examine
from orchestrator.cli.app import cli
from orchestrator.machine.drafts.draft_choice import draft_choice
from orchestrator.machine.gguf.folder import gguf_folder
from orchestrator.machine.target import MEANINGS
from orchestrator.runtime import model_checks
from orchestrator.runtime.model_checks import described, draft_findings, target_finding, told
from protocol.contracts.drafters.detection import has_own_head, read_drafter
from protocol.contracts.model_report import Loaded, ModelRefusal, ModelReport
from protocol.messages.base import Level
from protocol.worker.process import WorkerSetup
from target_worker import model_examination
from tests.support.models.drafter_files import FORMATS, VOCABULARY, WIDTH, layer, write
from tests.support.models.fitted_drafters import guessed_text
from tests.support.models.gguf_files import write_gguf
from tests.support.models.trained_drafters import write_block_folder, write_target
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


def asked(*arguments: str, **environment: str) -> list[Any]:
    """The findings of `doctor --json`."""
    result = CliRunner().invoke(cli, ["doctor", "--json", *arguments], env=environment)
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_beside_a_target_the_layers_are_known_and_the_fit(
    tmp_path: Path, target: Path, home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model_checks, "_examination", lambda *_: Loaded(guessed="All are right."))
    config, tensors = FORMATS["safeailab"]()
    folder = write(tmp_path / "drafter", (config, tensors | {"embed_tokens.weight": (VOCABULARY, WIDTH)}))
    (alone,), (beside, keys, reading) = draft_findings(str(folder)), draft_findings(str(folder), str(target))

    assert "three outputs (a low, a middle and a high one) of the target" in alone.text
    assert "the outputs of layers 1, 3, 4 (from 0)" in beside.text
    assert beside.text.endswith("It fits this target.")
    assert (reading.status, reading.text) == ("ok", "All are right.")
    assert "\ndraft_vocab_size 24: other values are refused\n" in keys.text
    assert keys.text.endswith("\nNot used: architectures ['LlamaForCausalLMEagle3'].")


@pytest.mark.thorough
def test_a_key_that_is_read_wrongly_is_a_warning_here_and_at_each_start(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, target = tmp_path / "drafter", tmp_path / "target"
    model = write_target(target, num_hidden_layers=6)
    write_block_folder(folder, "z-lab", model, outputs=(1, 3), target_layers=6)
    config = json.loads((folder / "config.json").read_text())
    setup = WorkerSetup(address="", epoch=0, incarnation=0, engine="block", model=str(folder), target=str(target))
    text = guessed_text(open_engine(setup), vars(model.args), 64)
    monkeypatch.setattr(drafter_examination, "own_text", lambda _: text)
    monkeypatch.setattr(model_checks, "_examination", lambda role, module, *arguments: examine(*arguments))

    def start() -> str:
        return draft_choice("auto", str(folder), target=target).note

    assert "was never checked" in start()
    for block, status in ((8, "warn"), (4, "ok")):
        (folder / "config.json").write_text(json.dumps(config | {"block_size": block}))
        _, keys, reading = draft_findings(str(folder), str(target))

        assert f"block_size {block}: block {block}\n" in keys.text
        assert (reading.status, start()) == (status, reading.text if status == "warn" else ""), reading.text
        assert ("block_size of" in reading.text and "with 4 " in reading.text) == (status == "warn")
    assert open_engine(setup).expected == 1.0


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (
            "specforge",
            "drafter holds an EAGLE-3 drafter (SafeAILab format) for the draft engine eagle3.|"
            "the outputs of layers 0, 2, 5 (from 0) of the target, 96 bytes a token in 16 bits",
        ),
        ("qwen_mtp", "the last output behind the final norm of the target, 32 bytes a token"),
    ],
)
def test_each_kind_is_told_in_its_own_words(tmp_path: Path, form: str, words: str):
    (found,) = asked("--draft", str(write(tmp_path / "drafter", FORMATS[form]())))

    assert found["status"] == "ok"
    assert all(part in found["text"] for part in words.split("|"))


def test_an_ordinary_model_and_one_with_a_head_of_its_own(target: Path):
    assert "is a language model: it reads tokens alone" in draft_findings(str(DEMO_DRAFT))[0].text
    assert "It has an MTP head too" in draft_findings(str(target))[0].text
    drafter = read_drafter(target, with_own_head=True)
    assert drafter is not None
    assert "holds an MTP head (Qwen format)" in told(target, drafter, None)


def test_a_head_of_an_architecture_that_is_not_run_is_no_draft(target: Path):
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"model_type": "mimo"}))

    assert "MTP head" not in draft_findings(str(target))[0].text
    assert not has_own_head(target)


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
    monkeypatch.setattr(model_checks, "_examination", lambda role, module, *arguments: examine(*arguments))

    assert draft_findings(str(folder))[0].status == "ok"
    finding, *_ = draft_findings(str(folder), str(target))
    assert (finding.status, words in finding.text) == ("fail", True), finding.text


def test_what_is_wrong_with_a_drafter_is_a_failure_with_its_sentence(tmp_path: Path):
    config, tensors = FORMATS["dflash"]()
    damaged = write(tmp_path / "damaged", (config, {"fc.weight": tensors["fc.weight"]}))
    own, head = FORMATS["qwen_mtp"]()
    split = {"model_type": "qwen3_5_mtp", "text_config": own}
    renamed = {name.removeprefix("mtp."): shape for name, shape in head.items()}
    for folder, beside, words in (
        (damaged, None, "lacks the tensor layers.0.self_attn.k_proj.weight"),
        (write(tmp_path / "other", FORMATS["dspark"]()), str(DEMO_TARGET), "does not fit the target"),
        (write(tmp_path / "split", (split, renamed)), None, "an MTP head in mlx-vlm's own packaging (qwen3_5_mtp)"),
    ):
        finding, *_ = draft_findings(str(folder), beside)

        assert words in finding.text
        assert finding.status == "fail"


# Targets -------------------------------------------------------------------------------------------


def report(level: Level, reason: str = "") -> ModelReport:
    return ModelReport(architecture="lfm2", level=level, reason=reason, joins=False, context=4096)


@pytest.mark.thorough
def test_a_target_is_loaded_in_a_process_of_its_own_and_its_level_told():
    (found,) = asked("--target", str(DEMO_TARGET))

    assert (found["name"], found["status"]) == ("target", "ok")
    assert f"(llama) is a tree model: {MEANINGS['tree']}. Several requests share a forward" in found["text"]


@pytest.mark.parametrize(
    ("level", "layers", "states"),
    [("chain", 6, "The states of its 6 layers can be recorded"), ("plain", 0, "Its states can't be recorded")],
)
def test_a_lower_level_is_told_with_its_reason_and_whether_its_states_can_be_read(
    level: Level, layers: int, states: str
):
    found = msgspec.structs.replace(report(level, "its recurrent layers keep one state."), recorded_layers=layers)
    finding = described(Path("models/LFM2-1B"), found)

    assert finding.status == "ok"
    assert finding.text.startswith(f"LFM2-1B (lfm2) is a {level} model: {MEANINGS[level]}. It is no higher level: its")
    assert "keep one state. Several requests are evaluated in turns; the context is 4,096 tokens." in finding.text
    assert states in finding.text


@pytest.mark.parametrize(
    ("joins", "deviation", "words"),
    [
        (True, 0.00036, "deviate by 0.00036 standard deviations, which is more than rounding: a text may depend on"),
        (False, 0.31, "are evaluated in turns, since logits in one forward for several deviate by 0.31 standard"),
    ],
)
def test_by_how_much_a_joint_forward_deviates_is_told(joins: bool, deviation: float, words: str):
    changes = {"joins": joins, "joint_deviation": deviation, "batch_dependent": joins}
    text = described(Path("m"), msgspec.structs.replace(report("tree"), **changes)).text

    assert words in text
    assert ("One with a seed shares no forward." in text) is joins


def test_a_model_that_can_not_be_loaded_is_told_with_its_sentence(tmp_path: Path):
    for file in DEMO_TARGET.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "no-such-model"}))
    refused = model_examination.examine(tmp_path)

    assert isinstance(refused, ModelRefusal)
    finding = described(tmp_path, refused)
    assert (finding.status, finding.text) == ("fail", refused.text)
    assert "no-such-model" in finding.text


def test_a_name_without_a_model_is_a_failure_with_the_next_step(tmp_path: Path):
    result = CliRunner().invoke(cli, ["doctor", "--json", "--target", str(tmp_path / "none")])

    assert result.exit_code == 1
    assert "There is no folder" in json.loads(result.stdout)[0]["text"]


@pytest.mark.parametrize(("most", "choice"), [(1 << 40, "are expanded to"), (1, "are not expanded, since 1 MiB")])
def test_what_became_of_a_gguf_files_weights_is_told(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, most: int, choice: str
):
    write_gguf(tmp_path / "m.gguf", kinds={"ffn_down": "Q6_K", "": "Q4_K"})
    monkeypatch.setattr(model_checks, "computes_on_processor", lambda: True)
    monkeypatch.setattr(model_checks, "usable_bytes", lambda: most)

    told = " ".join(model_checks.weights_told(gguf_folder(tmp_path / "m.gguf")))
    assert re.search(r"from m\.gguf \(0\.00 GB\) to .* quantised again \(Q6_K in 8 bits, off by 0\.\d\d%\)\.", told)
    assert re.search(rf"packed weights slowly: they {choice}", told)


@pytest.mark.parametrize("end", [subprocess.CompletedProcess([], -9, b"", b""), subprocess.TimeoutExpired([], 1.0)])
def test_a_process_that_crashes_or_hangs_is_told(monkeypatch: pytest.MonkeyPatch, end: Any):
    monkeypatch.setattr(model_checks.subprocess, "run", Mock(side_effect=[end]))
    finding = target_finding(str(DEMO_TARGET))

    assert (finding.status, finding.next_step is None) == ("fail", False)
    assert "crashed or hung" in finding.text


def test_a_target_in_the_environment_does_not_replace_the_examination_of_the_machine():
    assert len(asked(LAUNCH_PIPELINE_TARGET=str(DEMO_TARGET))) > 5
