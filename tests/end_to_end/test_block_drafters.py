"""Block drafters in real processes, with random weights: each gets live features, and none changes a token."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from mlx_lm.utils import load_model

from draft_worker.drafters.block import BlockDrafter
from draft_worker.drafters.eagle3 import Eagle3
from draft_worker.drafters.files import parameters
from draft_worker.drafters.token_ends import TokenEnds
from orchestrator import Pipeline, SamplingParams
from orchestrator.core.events import Arrived
from orchestrator.machine.drafts import draft_choice
from orchestrator.machine.drafts.auto_draft import place_of
from orchestrator.runtime.notices import Notice
from orchestrator.runtime.recording import replay
from protocol.contracts.coreml import recorded
from protocol.contracts.drafters.description import BlockForm, Eagle3Form
from protocol.messages.worker import Grow
from tests.conftest import Reference
from tests.support.models.block_files import write_block
from tests.support.models.trained_drafters import loud
from tests.support.paths import DEMO_TARGET
from tests.support.processes import mark, remains, until

TEXT = "def quicksort(items):\n    return "
REQUESTS = [SamplingParams(max_tokens=32), *(SamplingParams(max_tokens=32, temperature=t, seed=2) for t in (0.7, 1.0))]


def write_dflash2(folder: Path, config: dict[str, Any], target: Any) -> None:
    heads = config["num_attention_heads"]
    form = BlockForm(
        width=config["hidden_size"],
        layers=2,
        heads=heads,
        kv_heads=heads,
        head_width=config["hidden_size"] // heads,
        inner=64,
        vocabulary=config["vocab_size"],
        outputs=(0, 3),
        output_width=config["hidden_size"],
        target_layers=config["num_hidden_layers"],
        block=8,
        mask_token=config["vocab_size"] - 1,
        anchor_predicts=False,
        rank=8,
        choices=16,
        taps=2,
        tap_group=16,
        positions=512,
        windows=(16, 16),
        causal="none",
    )
    ends = TokenEnds.of(target.model.embed_tokens, None)
    write_block(folder, loud(BlockDrafter(form)), ends, config)


def write_peagle(folder: Path, config: dict[str, Any], _target: Any) -> None:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    form = Eagle3Form(
        outputs=(0, 2, 4),
        width=width,
        inner=64,
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        layers=2,
        vocabulary=config["vocab_size"],
        head_size=config["vocab_size"],
        output_width=width,
        own_head=False,
        mask_token=config["vocab_size"] - 1,
        depths=6,
    )
    layers = {"layers.0.": "layers.1.", "midlayer.": "layers.0."}
    tensors = {}
    for name, values in parameters(loud(Eagle3(form))):
        start = next((each for each in layers if name.startswith(each)), "")
        tensors[layers.get(start, "") + name.removeprefix(start)] = values
    written = {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 6}]},
        "draft_vocab_size": config["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        "mask_token_id": config["vocab_size"] - 1,
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": 64,
            "num_attention_heads": heads,
            "head_dim": width // heads,
            "num_hidden_layers": 2,
            "vocab_size": config["vocab_size"],
        },
    }
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps(written))


@pytest.mark.parametrize("write", [write_dflash2, write_peagle])
def test_tokens_are_the_targets_own(write: Any, reference: Reference, tmp_path: Path):
    config = json.loads((DEMO_TARGET / "config.json").read_text())
    mx.random.seed(5)
    write(tmp_path / "drafter", config, load_model(DEMO_TARGET)[0])

    journal = tmp_path / "journal"
    with Pipeline(str(DEMO_TARGET), str(tmp_path / "drafter"), record=str(journal)) as pipeline:
        name = mark(pipeline)
        results = [list(pipeline.generate(TEXT, params).tokens) for params in REQUESTS]

    assert results == [list(reference(TEXT, params).tokens) for params in REQUESTS]
    messages = [event.message for event, _ in replay(journal) if isinstance(event, Arrived)]
    assert any(isinstance(each, Grow) and each.tokens and each.staleness == 0 for each in messages)
    assert remains(name) == []


@pytest.mark.thorough
def test_the_automatic_engine_converts_examines_and_tries_a_drafter(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The executor stands for the Neural Engine."""
    for variable in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(draft_choice, "neural_engine", lambda: "executor")
    config = json.loads((DEMO_TARGET / "config.json").read_text())
    mx.random.seed(5)
    write_dflash2(tmp_path / "drafter", config, load_model(DEMO_TARGET)[0])
    notices: list[Notice] = []
    pipeline = Pipeline(str(DEMO_TARGET), str(tmp_path / "drafter"), lookup="off", on_notice=notices.append)
    assert pipeline._setup.auto is not None
    auto = msgspec.structs.replace(pipeline._setup.auto, predicts=3)
    pipeline._setup = msgspec.structs.replace(pipeline._setup, auto=auto)
    params = REQUESTS[1]
    with pipeline:
        name = mark(pipeline)
        first = pipeline.generate(TEXT, params).tokens
        until(lambda: [each for each in notices if each.kind in ("told", "warning")], seconds=240)
        second = pipeline.generate(TEXT, params).tokens

    told = [each.text for each in notices if each.kind == "told"]
    assert told[0] == "The draft runs in MLX and, on trial, on the Neural Engine."
    assert list(first) == list(second) == list(reference(TEXT, params).tokens)
    verdict = recorded(place_of(auto.package))
    assert verdict is not None
    assert verdict.choice == "coreml"
    assert remains(name) == []


def test_a_drafter_that_is_never_right_is_reported_once_and_goes_on(reference: Reference, tmp_path: Path):
    config = json.loads((DEMO_TARGET / "config.json").read_text())
    mx.random.seed(5)
    write_dflash2(tmp_path / "drafter", config, load_model(DEMO_TARGET)[0])
    params = SamplingParams(max_tokens=48, temperature=1.0, seed=2)

    notices: list[Notice] = []
    drafter = str(tmp_path / "drafter")
    # In turns each guess is judged; adaptive may give such a draft up before enough of them are.
    with Pipeline(str(DEMO_TARGET), drafter, strategy="sd", on_notice=notices.append) as pipeline:
        tokens = pipeline.generate(TEXT, params).tokens

    assert list(tokens) == list(reference(TEXT, params).tokens)
    told = [notice.text for notice in notices if "probably trained for another target" in notice.text]
    assert len(told) == 1
