"""A model folder that can't be served is refused with a sentence that names the folder and the reason."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from protocol.errors import InputError
from protocol.inference.language_model import LanguageModel, impossible_windows
from tests.support.models.architectures import configuration, tiny


def refusal(folder: Path, name: str, without: str = "nothing", **changes: Any) -> str:
    """The sentence for a tiny model whose config.json has `changes`, and whose weights lack a part."""
    weights = dict(tree_flatten(tiny(name).parameters()))
    kept = {key: array for key, array in weights.items() if without not in key}
    mx.save_safetensors(str(folder / "model.safetensors"), kept)
    (folder / "config.json").write_text(json.dumps(configuration(name) | changes))
    with pytest.raises(InputError) as refused:
        LanguageModel.load(folder)
    return str(refused.value)


@pytest.mark.parametrize("window", [0, -5, "16", 16.5, None, True])
@pytest.mark.parametrize(
    ("name", "field"), [("gemma3_text", "sliding_window"), ("mimo_v2_flash", "sliding_window_size")]
)
def test_a_window_that_is_no_number_of_tokens(name: str, field: str, window: Any, tmp_path: Path):
    found = refusal(tmp_path, name, **{field: window})

    assert f"config.json in {tmp_path} states a window of {window!r} tokens" in found


@pytest.mark.parametrize("chunk", [0, "16"])
def test_a_chunk_that_is_no_number_of_tokens(chunk: object, tmp_path: Path):
    text = configuration("llama4")["text_config"] | {"attention_chunk_size": chunk}

    assert f"config.json in {tmp_path} states a window of {chunk!r} tokens" in refusal(
        tmp_path, "llama4", text_config=text
    )


def test_windows_are_found_among_several_caches_of_a_layer():
    caches = [CacheList(KVCache(), RotatingKVCache(max_size=0)), RotatingKVCache(max_size=8)]

    assert impossible_windows(caches) == [0]


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "rwkv7"])
def test_weights_that_lack_a_layer(name: str, tmp_path: Path):
    found = refusal(tmp_path, name, without="layers.1.")

    assert f"The model in {tmp_path} can't be loaded (Missing" in found
    assert "layers.1." in found


def test_weights_for_fewer_layers_than_are_stated(tmp_path: Path):
    found = refusal(tmp_path, "gemma3_text", num_hidden_layers=6)

    assert str(tmp_path) in found
    assert "layers.4." in found


def test_an_architecture_that_mlx_lm_does_not_have(tmp_path: Path):
    found = refusal(tmp_path, "qwen3_next", model_type="qwen9_next")

    assert f"The model in {tmp_path} can't be loaded (Model type qwen9_next not supported)" in found


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
def test_a_vocabulary_of_no_tokens(name: str, tmp_path: Path):
    assert str(tmp_path) in refusal(tmp_path, name, vocab_size=0)


@pytest.mark.parametrize(
    ("name", "changes"), [("llama", {"num_attention_heads": 0}), ("gemma3_text", {"sliding_window_pattern": 0})]
)
def test_sizes_that_divide_by_zero(name: str, changes: dict[str, Any], tmp_path: Path):
    found = refusal(tmp_path, name, **changes)

    assert str(tmp_path) in found
    assert "by zero" in found
