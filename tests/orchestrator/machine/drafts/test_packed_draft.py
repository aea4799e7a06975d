"""Laws of a draft that is shipped without its target's embedding: it becomes a whole model folder, once."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import dequantize_model, load_model

from draft_worker.engines.mlx import MlxEngine
from orchestrator.machine.drafts.packed_draft import CONFIG, LAYERS, join, whole_draft
from protocol.contracts.head_tokens import HEAD_TOKENS
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint
from protocol.errors import InputError
from tests.support.models.packed_drafts import HEAD, pack, packed, target, trained


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return target(tmp_path / "target")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


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

    draft, theirs = (network(folder) for folder in (tmp_path / "whole", model))
    assert np.array_equal(numbers(draft.embed_tokens), numbers(theirs.embed_tokens))
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        block, kind = name.split(".")
        found = numbers(getattr(getattr(draft.layers[0], block), kind))
        np.testing.assert_allclose(found, weights[f"model.layers.0.{name}.weight"], atol=0.03)
    np.testing.assert_allclose(numbers(draft.norm), weights["model.norm.weight"], rtol=0.01)


def test_what_is_shipped_has_no_embedding(tmp_path: Path):
    assert b"embed" not in (packed(tmp_path / "packed") / LAYERS).read_bytes()


def test_the_draft_engine_loads_it_with_the_targets_tokenizer_and_its_own_positions(
    tmp_path: Path, model: Path, cache: Path
):
    draft = packed(tmp_path / "packed")
    folder = whole_draft(draft, model)

    engine = MlxEngine.load(folder)

    assert engine.tokenizer == vocabulary_fingerprint(model)
    assert engine.context == json.loads((draft / CONFIG).read_text())["max_position_embeddings"]
    assert np.array_equal(np.load(folder / HEAD_TOKENS), HEAD)


def test_it_is_made_once(tmp_path: Path, model: Path, cache: Path):
    draft = packed(tmp_path / "packed")
    first = whole_draft(draft, model)
    made = (first / "model.safetensors").stat().st_mtime_ns

    assert whole_draft(draft, model) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    assert folders(cache) == [first]


def test_another_head_makes_another_folder(tmp_path: Path, model: Path, cache: Path):
    draft = packed(tmp_path / "packed")
    first = whole_draft(draft, model)
    np.save(draft / HEAD_TOKENS, HEAD[1:])

    assert whole_draft(draft, model) != first


def test_another_tokenizer_makes_another_folder(tmp_path: Path, model: Path, cache: Path):
    draft = packed(tmp_path / "packed")
    first = whole_draft(draft, model)
    file = model / "tokenizer.json"
    file.write_text(file.read_text() + "\n")

    assert whole_draft(draft, model) != first


def test_a_draft_of_another_targets_shape_is_refused(tmp_path: Path, model: Path, cache: Path):
    draft = packed(tmp_path / "packed", hidden_size=128)

    with pytest.raises(InputError, match="trained for another target"):
        whole_draft(draft, model)
    assert folders(cache) == []


@pytest.mark.parametrize("name", [CONFIG, LAYERS, HEAD_TOKENS])
def test_a_missing_file_is_named(tmp_path: Path, model: Path, cache: Path, name: str):
    draft = packed(tmp_path / "packed")
    (draft / name).unlink()

    with pytest.raises(InputError, match=f"has no {name}: install"):
        whole_draft(draft, model)


def test_layers_that_are_cut_off_leave_nothing(tmp_path: Path, model: Path, cache: Path):
    draft = packed(tmp_path / "packed")
    (draft / LAYERS).write_bytes((draft / LAYERS).read_bytes()[:-100])

    with pytest.raises(InputError, match="can't be read"):
        whole_draft(draft, model)
    assert folders(cache) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    draft = packed(tmp_path / "packed")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)

    with pytest.raises(InputError, match=r"can't be written \(No space left on device\)"):
        whole_draft(draft, model)
    assert folders(cache) == []
