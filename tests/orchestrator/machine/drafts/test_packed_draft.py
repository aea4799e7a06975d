"""Laws of a draft that is shipped without its target's embedding: it becomes a whole model folder, once."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import dequantize_model, load_model
from safetensors import safe_open

from draft_worker.engines.mlx import MlxEngine
from orchestrator.machine.default_target import DefaultModel
from orchestrator.machine.drafts import shipped_drafts as module
from orchestrator.machine.drafts.shipped_drafts import (
    CONFIG,
    LAYERS,
    PACKED,
    default_draft,
    join,
    packed_draft,
    shipped_draft,
    whole_draft,
    with_successors,
)
from protocol.contracts.model_folder import HEAD_TOKENS
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint
from protocol.errors import InputError
from protocol.speculation.successors import SUCCESSORS
from tests.support.models.packed_drafts import HEAD, pack, packed, target, trained
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return target(tmp_path / "target")


@pytest.fixture
def cache(home: Path) -> Path:
    return home / "cache"


def folders(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("drafts/*") if path.is_dir()]


def network(folder: Path) -> Any:
    """The layers and the embedding as mlx-lm loads them, dequantised."""
    return dequantize_model(load_model(folder)[0]).model


def numbers(module: Any) -> np.ndarray:
    return np.array(module.weight.astype(mx.float32))


def test_a_draft_gets_its_targets_embedding_and_keeps_its_layers(tmp_path: Path, model: Path):
    weights = trained(tmp_path / "draft")
    for name in ("packed", "whole"):
        (tmp_path / name).mkdir()
    pack(tmp_path / "draft", tmp_path / "packed")

    join(tmp_path / "packed", model, tmp_path / "whole")

    assert b"embed" not in (tmp_path / "packed" / LAYERS).read_bytes()

    draft, theirs = (network(folder) for folder in (tmp_path / "whole", model))
    assert np.array_equal(numbers(draft.embed_tokens), numbers(theirs.embed_tokens))
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        block, kind = name.split(".")
        found = numbers(getattr(getattr(draft.layers[0], block), kind))
        np.testing.assert_allclose(found, weights[f"model.layers.0.{name}.weight"], atol=0.03)
    np.testing.assert_allclose(numbers(draft.norm), weights["model.norm.weight"], rtol=0.01)


def test_the_draft_engine_loads_it_with_the_targets_tokenizer_and_its_own_positions(
    tmp_path: Path, model: Path, cache: Path
):
    draft = packed(tmp_path / "packed")
    folder = whole_draft(draft, model)

    engine = MlxEngine.load(folder)

    assert engine.tokenizer == vocabulary_fingerprint(model)
    assert engine.context == json.loads((draft / CONFIG).read_text())["max_position_embeddings"]
    head = engine.columns(engine.vocabulary).tokens
    assert head is not None
    assert head.tolist() == HEAD.tolist()


def test_it_is_made_once_for_each_head_tokenizer_and_table(tmp_path: Path, model: Path, cache: Path):
    draft, tokenizer = packed(tmp_path / "packed"), model / "tokenizer.json"
    first = whole_draft(draft, model)
    made = (first / "model.safetensors").stat().st_mtime_ns

    assert whole_draft(draft, model) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    assert folders(cache) == [first]
    np.save(draft / HEAD_TOKENS, HEAD[1:])
    second = whole_draft(draft, model)
    tokenizer.write_text(tokenizer.read_text() + "\n")
    third = whole_draft(draft, model)
    (draft / SUCCESSORS).write_bytes(bytes(15) + b"1")
    fourth = whole_draft(draft, model)
    assert len({first, second, third, fourth}) == 4
    assert (fourth / SUCCESSORS).read_bytes() == (draft / SUCCESSORS).read_bytes()


def test_a_table_is_the_draft_s_or_that_of_the_default_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    draft = packed(tmp_path / "packed")
    assert with_successors(DEMO_TARGET, draft) == draft
    assert with_successors(DEMO_TARGET, None) is with_successors(DEMO_TARGET, DEMO_DRAFT) is None
    monkeypatch.setattr(module, "is_default_target", lambda _: True)
    assert with_successors(DEMO_TARGET, DEMO_DRAFT) == with_successors(DEMO_TARGET, None) == packed_draft()


@pytest.mark.parametrize("name", PACKED)
def test_a_missing_file_is_named(tmp_path: Path, model: Path, cache: Path, name: str):
    draft = packed(tmp_path / "packed")
    (draft / name).unlink()

    with pytest.raises(InputError, match=f"has no {name}: install"):
        whole_draft(draft, model)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("another shape", "trained for another target"),
        ("cut off", "can't be read"),
        ("full disk", r"can't be written \(No space left on device\)"),
    ],
)
def test_a_draft_of_another_shape_cut_layers_and_a_full_disk_leave_nothing(
    tmp_path: Path, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, case: str, words: str
):
    draft = packed(tmp_path / "packed", **({"hidden_size": 128} if case == "another shape" else {}))
    if case == "cut off":
        (draft / LAYERS).write_bytes((draft / LAYERS).read_bytes()[:-100])
    if case == "full disk":
        monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=OSError(28, "No space left on device")))

    with pytest.raises(InputError, match=words):
        whole_draft(draft, model)
    assert folders(cache) == []


# The shipped drafts ------------------------------------------------------------------------------


MOST_BYTES = 20 << 20
HIDDEN, VOCABULARY = 576, 49_152
"""Of SmolLM2-135M-Instruct."""


@pytest.fixture
def fetched(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model as the default target, and its packed draft."""
    folder, draft = target(tmp_path / "target"), packed(tmp_path / "packed")

    monkeypatch.setattr(module, "default_target", lambda *_: DefaultModel(folder))
    monkeypatch.setattr(module, "is_default_target", lambda given: given == folder)
    monkeypatch.setattr(module, "packed_draft", lambda: draft)
    return folder


def test_the_demo_draft_serves_targets_with_its_tokenizer_and_a_copy_of_the_default_target_gets_no_draft(
    fetched: Path, tmp_path: Path
):
    assert shipped_draft(DEMO_TARGET) == DEMO_DRAFT
    assert shipped_draft(target(tmp_path / "other")) is None


def test_where_the_default_target_is_the_demo_target_its_draft_is_the_default_and_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch,
):
    assert default_draft() == DefaultModel(DEMO_DRAFT)
    monkeypatch.setattr(module, "default_target", lambda *_: DefaultModel(DEMO_TARGET, "No network."))
    assert default_draft() == DefaultModel(DEMO_DRAFT, "No network.")


def test_the_shipped_draft_has_the_default_targets_shape_and_no_embedding():
    config = json.loads((packed_draft() / CONFIG).read_text())

    with safe_open(packed_draft() / LAYERS, framework="numpy") as layers:
        names = set(layers.keys())
    assert (config["hidden_size"], config["vocab_size"]) == (HIDDEN, VOCABULARY)
    assert not any("embed" in name or "lm_head" in name for name in names)
    assert {name.split(".")[2] for name in names if "layers" in name} == {
        str(layer) for layer in range(config["num_hidden_layers"])
    }


def test_the_shipped_draft_is_small_and_names_its_sources():
    files = list(packed_draft().iterdir())

    assert sum(file.stat().st_size for file in files) <= MOST_BYTES
    notice = (packed_draft() / "NOTICE").read_text()
    assert "Apache License" in notice
    assert "WordNet" in notice
