"""Laws of weights: a converted file computes what the same weights compute in mlx-lm, in every quantisation."""

from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_unflatten
from mlx_lm.utils import dequantize_model, load_model

from orchestrator.machine.gguf.folder import convert_gguf
from tests.support.models.gguf_files import SIZES, gguf_name, separated, write_gguf
from tests.support.models.tiny_models import greedy, network, stock_logits

PROMPT = [104, 101, 108, 108, 111, 32, 119, 262, 7, 200]
MIXED = {"token_embd": "Q8_0", "attn_v": "F16", "ffn_down": "Q4_K", "ffn_up": "Q6_K", "output.": "BF16", "": "Q4_1"}
FORMATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


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
    """As the workers load a folder on a processor."""
    model, _ = load_model(folder)
    model = dequantize_model(model)
    model.set_dtype(mx.float32)
    return model


def reference(file: Path, architecture: str, held: dict[str, Any], kind: str = "F16") -> Any:
    """mlx-lm's model of these weights: packed ones as MLX itself reads them from `file`, all others as `kind`."""
    theirs: dict[str, mx.array] = {}
    # MLX reads no file with tensors of some kinds, Q5_0 among them. No tensor of these files is packed.
    with suppress(RuntimeError):
        theirs = cast("dict[str, mx.array]", mx.load(str(file)))
    model = network(architecture, **SIZES)
    heads = {"attn_q": model.args.num_attention_heads, "attn_k": model.args.num_key_value_heads}
    weights = {}
    for name, array in held.items():
        stem = gguf_name(name, architecture).removesuffix(".weight")
        if f"{stem}.scales" in theirs:
            packed, scales = theirs[f"{stem}.weight"], theirs[f"{stem}.scales"]
            bits = packed.shape[1] // scales.shape[1]
            array = np.array(mx.dequantize(packed, scales, theirs[f"{stem}.biases"], group_size=32, bits=bits))
            if architecture == "llama" and stem[6:] in heads:
                array = separated(array, heads[stem[6:]])
        weights[name] = mx.array(array).astype(FORMATS[kind])
    model.update(tree_unflatten(list(weights.items())))
    model.set_dtype(mx.float32)
    return model


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_weights_are_kept_bit_by_bit(tmp_path: Path, architecture: str, kind: str):
    folder, held = converted(tmp_path, architecture=architecture, kinds={"": kind})
    theirs = reference(tmp_path / "model.gguf", architecture, held, kind)

    assert mx.array_equal(stock_logits(in_float32(folder), PROMPT), stock_logits(theirs, PROMPT))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_packed_weights_are_those_that_mlx_reads_from_the_file(tmp_path: Path, kind: str):
    folder, _ = converted(tmp_path, kinds={"": kind}, architecture="qwen2")
    theirs: Any = mx.load(str(tmp_path / "model.gguf"))
    ours: Any = mx.load(str(folder / "model.safetensors"))

    assert len(ours) == len(theirs)
    for name, array in ours.items():
        assert mx.array_equal(array, theirs[gguf_name(name, "qwen2")].astype(array.dtype)), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "kinds", [{"": "Q4_0"}, {"": "Q8_0"}, {"": "Q5_0"}, {"ffn_down": "IQ4_XS", "": "IQ4_NL"}, MIXED], ids=str
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_quantised_weights_give_the_tokens_of_the_same_weights_in_mlx(
    tmp_path: Path, architecture: str, kinds: dict[str, str]
):
    folder, held = converted(tmp_path, architecture=architecture, kinds=kinds)
    ours, theirs = in_float32(folder), reference(tmp_path / "model.gguf", architecture, held)

    assert mx.array_equal(stock_logits(ours, PROMPT), stock_logits(theirs, PROMPT))
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
