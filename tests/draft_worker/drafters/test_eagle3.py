"""EAGLE-3's network equals a reference in plain numpy, in each published form, and damaged folders get a sentence."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from draft_worker.drafters.eagle3 import Eagle3, read_eagle3, write_eagle3
from protocol.errors import InputError
from tests.support.eagle3_reference import Reference, Row
from tests.support.models import eagle3_folders as folders

_TOKENS = (3, 17, 0, 39, 8)


def _features(outputs: int) -> Any:
    return np.random.default_rng(5).normal(size=(len(_TOKENS), outputs * folders.TARGET_WIDTH)).astype(np.float32)


def _expected(reference: Reference, features: Any) -> Any:
    rows: list[Row] = []
    for position, (token, feature) in enumerate(zip(_TOKENS, features, strict=True)):
        rows.append(reference.row(token, reference.fuse(feature), rows, position))
    return np.stack([reference.logits(row) for row in rows])


def _computed(network: Eagle3, features: Any) -> Any:
    hidden = network.fuse(mx.array(features)[None])
    return np.array(network.logits(network(mx.array([_TOKENS]), hidden))[0])


def _assert_like_reference(folder: Path, outputs: int = 3) -> Eagle3:
    config = json.loads((folder / "config.json").read_text())
    stored: Any = mx.load(str(folder / "model.safetensors"))
    tensors = {name.replace("layers.0.", "midlayer."): values for name, values in stored.items()}
    network, features = read_eagle3(folder), _features(outputs)
    reference = Reference(tensors, config | config.get("transformer_layer_config", {}))
    assert np.allclose(_computed(network, features), _expected(reference, features), atol=1e-4, rtol=1e-4)
    return network


@pytest.mark.parametrize("family", [folders.safe_ai_lab, folders.speculators])
def test_both_families_give_the_reference_s_logits_and_our_numbers_of_outputs(tmp_path: Path, family: Any):
    network = _assert_like_reference(family(tmp_path))

    assert network.form.outputs == (0, 1, 3)
    assert network.head_tokens is not None
    assert tuple(network.head_tokens) == folders.HEAD_TOKENS


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_several_layers(tmp_path: Path, flag: str):
    network = _assert_like_reference(folders.several_layers(tmp_path, **{flag: True}))

    assert network.form.layers == 3
    assert len(network.make_cache()) == 3


def test_deep_spec_s_five_outputs_and_normed_heads(tmp_path: Path):
    network = _assert_like_reference(folders.deep_spec(tmp_path), outputs=5)

    assert network.form.outputs == (0, 1, 2, 3, 4)
    assert network.head_tokens is None


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_variants_of_the_norms(tmp_path: Path, flag: str):
    joined = 3 * folders.TARGET_WIDTH
    shapes = {"norm_before_fc": {"input_norm.weight": (joined,)}}
    shapes["fc_norm"] = {f"fc_norm.{output}.weight": (folders.TARGET_WIDTH,) for output in range(3)}
    config = json.loads((folders.safe_ai_lab(tmp_path) / "config.json").read_text()) | {flag: True}
    weights = folders.tensors(shapes.get(flag, {})) | folders.vocabulary_map()

    _assert_like_reference(folders.write(tmp_path, config, weights))


def test_biases_are_used_where_the_file_has_them(tmp_path: Path):
    config = json.loads((folders.safe_ai_lab(tmp_path) / "config.json").read_text())
    biases = {"midlayer.self_attn.q_proj.bias": (folders.HEADS * folders.SIZE,), "fc.bias": (folders.WIDTH,)}

    _assert_like_reference(folders.write(tmp_path, config, folders.tensors(biases) | folders.vocabulary_map()))


def test_what_is_written_is_read_again(tmp_path: Path):
    network = read_eagle3(folders.speculators(tmp_path / "theirs", norm_before_residual=True))

    write_eagle3(tmp_path / "ours", network, mx.float32)

    again = read_eagle3(tmp_path / "ours")
    assert again.form == network.form
    assert (_computed(again, _features(3)) == _computed(network, _features(3))).all()


def test_head_rows_in_any_order_are_sorted_by_token(tmp_path: Path):
    folder = folders.safe_ai_lab(tmp_path / "sorted")
    stored: Any = mx.load(str(folder / "model.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    order = [3, 0, 7, 1, 6, 2, 5, 4]
    tokens = mx.array([folders.HEAD_TOKENS[column] for column in order], dtype=mx.int64)
    mixed = stored | {"d2t": tokens - mx.arange(8), "lm_head.weight": stored["lm_head.weight"][mx.array(order)]}
    other = folders.write(tmp_path / "mixed", config, mixed)

    first, second = read_eagle3(folder), read_eagle3(other)

    assert (_computed(first, _features(3)) == _computed(second, _features(3))).all()


def test_default_outputs_are_those_of_the_paper(tmp_path: Path):
    folder = folders.safe_ai_lab(tmp_path / "drafter", eagle_config=None)
    target = folders.write(tmp_path / "target", folders.layer_config(num_hidden_layers=36), {})

    assert read_eagle3(folder, target).form.outputs == (1, 17, 32)


_FLAWS: dict[str, tuple[dict[str, Any], str]] = {
    "no outputs": ({"eagle_config": None}, "names no layers"),
    "outputs behind the target": ({"num_target_layers": 3}, "of a target of 3 layers"),
    "outputs that are text": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}}, "does not fit"),
    "another width": ({"hidden_size": 32}, "shape"),
    "another target's width": ({"target_hidden_size": 24}, "shape"),
    "another vocabulary": ({"vocab_size": 50}, "shape"),
    "a small vocabulary": ({"vocab_size": 20}, "different tokens below 20"),
    "uneven heads": ({"num_key_value_heads": 3}, "don't fit 3 KV heads"),
    "another activation": ({"hidden_act": "relu"}, "hidden_act 'relu'"),
    "another layer": ({"model_type": "gemma4_text"}, "model_type 'gemma4_text'"),
    "both norms": ({"norm_before_fc": True, "fc_norm": True}, "exclude"),
    "an unknown rope": ({"rope_scaling": {"rope_type": "spiral"}}, "rotary"),
    "a rope without its base": ({"rope_parameters": {"rope_theta": "much"}}, "rotary"),
    "a norm without its tensor": ({"norm_before_fc": True}, "input_norm"),
}


@pytest.mark.parametrize("flaw", _FLAWS)
def test_damaged_configs_get_a_sentence(tmp_path: Path, flaw: str):
    changes, words = _FLAWS[flaw]
    with pytest.raises(InputError, match=words) as raised:
        read_eagle3(folders.safe_ai_lab(tmp_path, **changes))
    assert str(tmp_path) in str(raised.value)


def test_every_missing_tensor_and_every_wrong_shape_gets_a_sentence(tmp_path: Path):
    config = json.loads((folders.safe_ai_lab(tmp_path) / "config.json").read_text())
    whole = folders.tensors() | folders.vocabulary_map()
    damaged = [{name: values for name, values in whole.items() if name != gone} for gone in whole]
    damaged += [whole | {name: mx.zeros((2, 3, 5))} for name in whole]
    served = [weights.keys() for weights in damaged if _is_served(tmp_path, config, weights)]

    # The embedding may be the target's, and t2d follows from d2t.
    assert served == [whole.keys() - {"embed_tokens.weight"}, whole.keys() - {"t2d"}, whole.keys()]


def _is_served(folder: Path, config: dict[str, Any], weights: dict[str, Any]) -> bool:
    try:
        read_eagle3(folders.write(folder, config, weights))
    except InputError:
        return False
    return True


def test_weights_that_are_not_finite_or_not_there_get_a_sentence(tmp_path: Path):
    config = json.loads((folders.safe_ai_lab(tmp_path) / "config.json").read_text())
    weights = folders.tensors() | folders.vocabulary_map()
    weights["norm.weight"] = mx.full((folders.WIDTH,), mx.nan)
    with pytest.raises(InputError, match="finite"):
        read_eagle3(folders.write(tmp_path, config, weights))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="safetensors"):
        read_eagle3(tmp_path)
