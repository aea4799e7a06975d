"""EAGLE-3's network equals a reference in plain numpy, in each published form, and damaged folders get a sentence."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from draft_worker.drafters.eagle3 import Eagle3, read_eagle3
from protocol.errors import InputError
from tests.support.eagle3_reference import Reference, Row
from tests.support.models import eagle3_folders as folders
from tests.support.models.drafter_files import FORMATS, HEAD, HEADS, LAYER, VOCABULARY, WIDTH

_TOKENS = (3, 17, 0, 39, 8)


def _features(outputs: int) -> Any:
    return np.random.default_rng(5).normal(size=(len(_TOKENS), outputs * WIDTH)).astype(np.float32)


def _expected(reference: Reference, features: Any) -> Any:
    rows: list[Row] = []
    for position, (token, feature) in enumerate(zip(_TOKENS, features, strict=True)):
        rows.append(reference.row(token, reference.fuse(feature), rows, position))
    return np.stack([reference.logits(row) for row in rows])


def _computed(network: Eagle3, features: Any) -> Any:
    hidden = network.fuse(mx.array(features)[None])
    return np.array(network.logits(network(mx.array([_TOKENS]), hidden))[0])


def _assert_like_reference(folder: Path, outputs: int = 3) -> Eagle3:
    network, features = read_eagle3(folder), _features(outputs)
    assert np.allclose(_computed(network, features), _expected(Reference.of(folder), features), atol=1e-4, rtol=1e-4)
    return network


@pytest.mark.parametrize(("family", "outputs"), [(folders.safe_ai_lab, (0, 2, 5)), (folders.speculators, (1, 3, 4))])
def test_both_families_give_the_reference_s_logits_and_our_numbers_of_outputs(
    tmp_path: Path, family: Any, outputs: tuple[int, ...]
):
    network = _assert_like_reference(family(tmp_path))

    assert network.form.outputs == outputs
    assert network.head_tokens is not None
    assert tuple(network.head_tokens) == folders.HEAD_TOKENS


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_several_layers(tmp_path: Path, flag: str):
    network = _assert_like_reference(folders.several_layers(tmp_path, {}, **{flag: True}))

    assert network.form.layers == 3
    assert len(network.make_cache()) == 3


def test_deep_spec_s_five_outputs_and_normed_heads(tmp_path: Path):
    network = _assert_like_reference(folders.deep_spec(tmp_path), outputs=5)

    assert network.form.outputs == (1, 2, 3, 4, 5)
    assert network.head_tokens is None


_VARIANTS: dict[str, dict[str, tuple[int, ...]]] = {
    "norm_before_residual": {},
    "norm_output": {},
    "norm_before_fc": {"input_norm.weight": (3 * WIDTH,)},
    "fc_norm": {f"fc_norm.{output}.weight": (WIDTH,) for output in range(3)},
    "biases": {"midlayer.self_attn.q_proj.bias": (HEADS * HEAD,), "fc.bias": (WIDTH,)},
}


@pytest.mark.parametrize("variant", _VARIANTS)
def test_variants_equal_the_reference(tmp_path: Path, variant: str):
    _assert_like_reference(folders.safe_ai_lab(tmp_path, _VARIANTS[variant], **{variant: True}))


def test_head_rows_in_any_order_are_sorted_by_token(tmp_path: Path):
    folder = folders.safe_ai_lab(tmp_path / "sorted")
    stored: Any = mx.load(str(folder / "model.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    order = np.random.default_rng(1).permutation(len(folders.HEAD_TOKENS))
    tokens = mx.array(np.array(folders.HEAD_TOKENS)[order] - np.arange(len(order)))
    mixed = stored | {"d2t": tokens, "lm_head.weight": stored["lm_head.weight"][mx.array(order)]}
    other = folders.write(tmp_path / "mixed", config, mixed)

    first, second = read_eagle3(folder), read_eagle3(other)

    assert (_computed(first, _features(3)) == _computed(second, _features(3))).all()


def test_default_outputs_are_those_of_the_paper(tmp_path: Path):
    folder = folders.safe_ai_lab(tmp_path / "drafter", eagle_config=None)
    target = folders.write(tmp_path / "target", LAYER | {"num_hidden_layers": 36}, {})

    assert read_eagle3(folder, target).form.outputs == (1, 17, 32)


_FLAWS: dict[str, tuple[dict[str, Any], str]] = {
    "no outputs": ({"eagle_config": None}, "names no layers"),
    "another vocabulary": ({"vocab_size": 50}, "shape"),
    "a small vocabulary": ({"vocab_size": 24}, "different tokens below 24|whole vocabulary|names"),
    "an unknown rope": ({"rope_scaling": {"rope_type": "spiral"}}, "rotary"),
    "a norm without its tensor": ({"norm_before_fc": True}, "input_norm"),
}


@pytest.mark.parametrize("flaw", _FLAWS)
def test_damaged_configs_get_a_sentence(tmp_path: Path, flaw: str):
    changes, words = _FLAWS[flaw]
    with pytest.raises(InputError, match=words) as raised:
        read_eagle3(folders.safe_ai_lab(tmp_path, **changes))
    assert str(tmp_path) in str(raised.value)


def test_every_missing_tensor_and_every_wrong_shape_gets_a_sentence(tmp_path: Path):
    config, whole = _safe_ai_lab()
    damaged = [{name: values for name, values in whole.items() if name != gone} for gone in whole]
    damaged += [whole | {name: mx.zeros((2, 3, 5))} for name in whole]
    served = []
    for weights in damaged:
        with suppress(InputError):
            read_eagle3(folders.write(tmp_path, config, weights))
            served.append(weights.keys())

    # The embedding may be the target's, and t2d follows from d2t.
    assert served == [whole.keys() - {"embed_tokens.weight"}, whole.keys() - {"t2d"}, whole.keys()]


def _safe_ai_lab() -> tuple[dict[str, Any], dict[str, mx.array]]:
    config, shapes = FORMATS["specforge"]()
    return config, folders.tensors({"embed_tokens.weight": (VOCABULARY, WIDTH)} | shapes)


def test_weights_that_are_not_finite_or_not_there_get_a_sentence(tmp_path: Path):
    config, weights = _safe_ai_lab()
    with pytest.raises(InputError, match="finite"):
        read_eagle3(folders.write(tmp_path, config, weights | {"norm.weight": mx.full((WIDTH,), mx.nan)}))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="safetensors"):
        read_eagle3(tmp_path)
