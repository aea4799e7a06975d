"""Laws of weights: a converted file holds what the `gguf` package reads in it, in every quantisation."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import dequantize_model, load_model

from orchestrator.machine.gguf import conversion_of
from orchestrator.machine.gguf.folder import convert_gguf
from tests.support.models.gguf_files import SIZES, write_gguf
from tests.support.models.tiny_models import greedy, network, stock_logits

PROMPT = [104, 101, 108, 108, 111, 32, 119, 262, 7, 200]
KEPT = {
    **{"Q4_0": (4, 32), "Q4_1": (4, 32), "Q5_0": (5, 32), "Q5_1": (5, 32), "Q8_0": (8, 32)},
    **{"Q4_K": (4, 32), "Q5_K": (5, 32), "TQ1_0": (2, 128), "TQ2_0": (2, 128), "MXFP4": (4, 32), "NVFP4": (4, 16)},
}
"""Bits and groups of types whose integers stay as they are."""
AGAIN = {
    **{"Q6_K": (8, 128, 0.01), "Q3_K": (3, 32, 0.16), "Q2_K": (2, 32, 0.31)},
    **dict.fromkeys(("IQ4_NL", "IQ4_XS"), (4, 32, 0.08)),
    **{"IQ3_S": (4, 128, 0.14), "IQ3_XXS": (3, 64, 0.19)},
    **dict.fromkeys(("IQ2_S", "IQ2_XS"), (3, 128, 0.26)),
    **dict.fromkeys(("IQ2_XXS", "IQ1_M", "IQ1_S"), (2, 128, 0.38)),
}
"""The same of types that are quantised again, and how far their weights may be off: about as far as the type itself."""
MIXED = {"token_embd": "Q8_0", "attn_v": "F16", "ffn_down": "Q4_K", "ffn_up": "Q5_0", "output.": "BF16", "": "Q4_1"}


@pytest.fixture(autouse=True)
def on_the_processor():
    mx.set_default_device(mx.cpu)


def converted(tmp_path: Path, **content: Any) -> tuple[Path, dict[str, Any]]:
    """The folder of a GGUF file with this content, and the weights that the file holds."""
    held = write_gguf(tmp_path / "model.gguf", **content)
    folder = tmp_path / "folder"
    folder.mkdir()
    convert_gguf(tmp_path / "model.gguf", folder)
    return folder, held


def in_float32(folder: Path) -> Any:
    """By mlx-lm's own loader, and each weight computed in 32 bits."""
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    model = dequantize_model(model)
    model.set_dtype(mx.float32)
    return model


def reference(architecture: str, held: dict[str, Any]) -> Any:
    """mlx-lm's model of these weights."""
    model = network(architecture, **SIZES)
    model.update(tree_unflatten([(name, mx.array(array)) for name, array in held.items()]))
    model.set_dtype(mx.float32)
    return model


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_weights_are_kept_bit_by_bit(tmp_path: Path, architecture: str, kind: str):
    folder, held = converted(tmp_path, architecture=architecture, kinds={"": kind})
    plain = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}[kind]
    theirs = reference(architecture, {name: mx.array(array).astype(plain) for name, array in held.items()})

    assert mx.array_equal(stock_logits(in_float32(folder), PROMPT), stock_logits(theirs, PROMPT))


@pytest.mark.parametrize("kind", [*KEPT, *AGAIN])
def test_stored_weights_are_those_of_the_file(tmp_path: Path, kind: str):
    folder, held = converted(tmp_path, kinds={"": kind}, architecture="qwen2")
    bits, group, most = (*KEPT[kind], 2**-11 if kind.endswith("K") else 0.0) if kind in KEPT else AGAIN[kind]
    model: Any
    model, _ = load_model(folder)
    flat: Any = tree_flatten(in_float32(folder).parameters())
    off = [
        np.sqrt(np.mean(np.square(np.array(array) - held[name])) / np.mean(np.square(held[name])))
        for name, array in flat
        if array.ndim > 1
    ]
    conversion = conversion_of(folder)

    assert (model.layers[0].mlp.up_proj.bits, model.layers[0].mlp.up_proj.group_size) == (bits, group)
    assert max(off) <= most
    assert conversion is not None
    if kind in KEPT:
        assert conversion.again == {}
    else:
        assert min(off) <= conversion.again[kind].off <= max(off)


def test_nvfp4_with_a_scale_of_the_matrix_is_multiplied_by_it(tmp_path: Path):
    scales = {f"blk.{layer}.ffn_up.scale": np.array([value], np.float32) for layer, value in enumerate((0.7, 1.0))}
    scales["blk.0.ffn_up.input_scale"] = np.ones(1, np.float32)
    folder, held = converted(tmp_path, kinds={"": "NVFP4"}, extra=scales)
    model: Any
    model, _ = load_model(folder)
    scaled, plain = (layer.mlp.up_proj for layer in model.layers[:2])
    ours, theirs = in_float32(folder).layers[0].mlp.up_proj.weight, held["model.layers.0.mlp.up_proj.weight"]

    assert ((scaled.mode, scaled.bits), (plain.mode, plain.bits)) == (("affine", 4), ("nvfp4", 4))
    assert np.sum(np.array(ours) * theirs) / np.sum(theirs * theirs) == pytest.approx(0.7, abs=0.01)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kinds", [*({"": kind} for kind in KEPT), MIXED], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_kept_integers_give_the_tokens_of_the_expanded_weights(
    tmp_path: Path, architecture: str, kinds: dict[str, str]
):
    folder, held = converted(tmp_path, architecture=architecture, kinds=kinds)
    ours, theirs = in_float32(folder), reference(architecture, held)

    assert np.allclose(stock_logits(ours, PROMPT), stock_logits(theirs, PROMPT), atol=2e-2)
    assert greedy(ours, PROMPT) == greedy(theirs, PROMPT)


def test_layers_of_other_bits_have_entries_of_their_own(tmp_path: Path):
    folder, _ = converted(tmp_path, kinds={"token_embd": "Q8_0", "attn_v": "F16", "": "Q4_1"})
    model: Any
    model, config = load_model(folder)

    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }
    assert (model.model.embed_tokens.bits, model.layers[0].self_attn.q_proj.bits) == (8, 4)
    assert not hasattr(model.layers[0].self_attn.v_proj, "bits")


def test_no_float32_is_beside_packed_weights(tmp_path: Path):
    folder, _ = converted(tmp_path, kinds={"": "Q4_0"})
    found: Any = mx.load(str(folder / "model.safetensors"))

    assert {array.dtype for array in found.values()} == {mx.uint32, mx.float16}
