"""A config.json in the form of Transformers 5 gives the logits of the older form, or is refused."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from protocol.errors import InputError
from protocol.inference.language_model import LanguageModel
from protocol.inference.stored_model import load_network
from tests.support.models.architectures import configuration, tiny

_BASE = 543_210.0
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_NAMES = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_emb_base", "rotary_pct")


def logits(folder: Path, name: str, config: dict[str, Any], **weights: mx.array) -> np.ndarray:
    kept: dict[str, mx.array] = dict(tree_flatten(tiny(name).parameters()))
    kept = {key: 4 * array if array.ndim == 2 else array for key, array in kept.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), kept | weights)
    (folder / "config.json").write_text(json.dumps(config))
    network, _ = load_network(folder)
    return np.array(network(mx.array([[1, 2, 3, 4, 5, 6, 7]])))


def flat(name: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in configuration(name).items() if key not in _NAMES} | changes


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral", "phi", "gpt_oss", "exaone4", "granite", "glm4_moe"])
@pytest.mark.parametrize("scaling", [{}, _YARN], ids=["plain", "yarn"])
def test_rope_parameters_count_like_flat_fields(name: str, scaling: dict[str, Any], tmp_path: Path):
    before = flat(name, rope_theta=_BASE, rope_scaling=scaling or None, partial_rotary_factor=0.5)
    after = flat(name, rope_parameters={"rope_theta": _BASE, "partial_rotary_factor": 0.5, **scaling})

    assert np.array_equal(logits(tmp_path, name, after), logits(tmp_path, name, before))


def test_each_kind_of_layer_has_its_own_positions(tmp_path: Path):
    old = flat("gemma3_text", rope_theta=_BASE, rope_local_base_freq=777.0)
    new = flat(
        "gemma3_text",
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "full_attention": {"rope_theta": _BASE, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 777.0, "rope_type": "default"},
        },
    )
    old["sliding_window_pattern"], _ = 2, new.pop("sliding_window_pattern", None)

    assert np.array_equal(logits(tmp_path, "gemma3_text", new), logits(tmp_path, "gemma3_text", old))


@pytest.mark.parametrize("field", ["head_dim", "intermediate_size"])
def test_fields_of_single_layers_are_those_of_layers_without_a_window(field: str, tmp_path: Path):
    old, model = configuration("gemma4_text", attention_k_eq_v=True), tiny("gemma4_text", attention_k_eq_v=True)
    full = {field: old["global_head_dim"], "num_key_value_heads": old["num_global_key_value_heads"]}
    new = {name: value for name, value in old.items() if "global" not in name} | {
        "per_layer_config": {"01": full, "3": full}
    }
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (tmp_path / "config.json").write_text(json.dumps(new))
    if field != "head_dim":
        with pytest.raises(InputError, match="states intermediate_size, num_key_value_heads of single layers"):
            load_network(tmp_path)
        return

    tokens = mx.array([[1, 2, 3, 4, 5, 6, 7]])
    assert mx.array_equal(load_network(tmp_path)[0](tokens), model(tokens))


def test_positions_that_an_architecture_has_no_place_for_are_refused(tmp_path: Path):
    kinds = {kind: {"rope_theta": base} for kind, base in (("full_attention", _BASE), ("sliding_attention", 1e4))}

    with pytest.raises(InputError, match=r"each of full_attention, sliding_attention .* choose another model"):
        logits(tmp_path, "llama", flat("llama", rope_parameters=kinds))


def test_a_base_that_the_network_does_not_use_is_refused(tmp_path: Path):
    config = flat("llama", rope_theta=10_000.0, positions={"rope_theta": _BASE})
    assert logits(tmp_path, "llama", config).shape

    with pytest.raises(InputError, match=r"states a rotary base of 543,210, .* computes with 10,000"):
        logits(tmp_path, "llama", flat("llama", positions={"rope_theta": _BASE}))


def test_a_head_in_the_files_is_used_where_the_config_does_not_speak_of_it(tmp_path: Path):
    config = flat("llama", rope_theta=_BASE)
    head = mx.random.normal((config["vocab_size"], config["hidden_size"]), key=mx.random.key(1))
    config.pop("tie_word_embeddings", None)
    silent = logits(tmp_path, "llama", config, **{"lm_head.weight": head})
    stated = logits(tmp_path, "llama", config | {"tie_word_embeddings": False}, **{"lm_head.weight": head})

    assert np.array_equal(silent, stated)


def test_a_target_in_the_new_form_is_served(tmp_path: Path):
    logits(tmp_path, "llama", flat("llama", rope_parameters={"rope_theta": _BASE}, dtype="float16"))

    assert LanguageModel.load(tmp_path).network.args.rope_theta == _BASE
