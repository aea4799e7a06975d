"""GGUF files of models small enough to make in a test, written by the gguf package."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from mlx.utils import tree_flatten

from tests.support.models.tiny_models import network

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 272,
}
_HUB_NAMES = {
    "language_model.": "",
    "block_sparse_moe.switch_mlp": "mlp.experts",
    "experts.switch_glu": "mlp.experts",
    "switch_mlp": "experts",
    "self_attn.sinks": "self_attn.sinks.weight",
    "linear_attn.dt_bias": "linear_attn.dt_proj.bias",
    "self_attn.embed_q": "self_attn.k_b_proj",
    "self_attn.unembed_out": "self_attn.v_b_proj",
    "e_score_correction_bias": "e_score_correction.bias",
    "expert_bias": "expert_bias.bias",
}
"""What the hub's checkpoints call tensors for which mlx-lm has names of its own."""
_MOST_LAYERS = 8
_MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
_SPECIAL = ["<|start|>", "<|end|>", "<tool>", "<|pad|>"]
START, END = 262, 263
CHAT_TEMPLATE = "{% for message in messages %}<|start|>{{ message['content'] }}<|end|>{% endfor %}<|start|>"


def byte_letters() -> list[str]:
    """A character for each byte, as byte-level tokenizers write it."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in seen]
    letters = {byte: chr(byte) for byte in seen} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def vocabulary() -> list[str]:
    """One token a byte, six merges, four special tokens, and two that nothing uses."""
    return [*byte_letters(), *(merge.replace(" ", "") for merge in _MERGES), *_SPECIAL, *(f"<{i}>" for i in range(6))]


def weights(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """An mlx-lm model's float32 weights by their names there."""
    flat: Any = tree_flatten(model.parameters())
    return {name: np.array(array.astype(mx.float32)) for name, array in flat}


def gguf_name(name: str, architecture: str) -> str:
    """llama.cpp's own name for a tensor of mlx-lm's model."""
    for ours, hubs in _HUB_NAMES.items():
        name = name.replace(ours, hubs)
    found = _table(architecture).get_name(name, try_suffixes=(".weight", ".bias", ".scales", ".biases"))
    assert found is not None, f"{architecture} has no {name}"
    return found


@cache
def _table(architecture: str) -> gguf.TensorNameMap:
    known = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(known[architecture], _MOST_LAYERS)


def interleaved(array: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows in the order that llama.cpp's converter gives q and k: of each head the halves in turns."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


_SCALES = {
    **{"Q4_K": slice(4), "Q5_K": slice(4), "Q2_K": slice(-4, None), "Q3_K": slice(-2, None), "Q6_K": slice(-2, None)},
    "NVFP4": slice(4),
}
"""Where a block has its scales; others begin with one."""


def quantized(array: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Bytes of `array`; random blocks with small scales for types that the package can't write."""
    try:
        return gguf.quants.quantize(array, kind)
    except NotImplementedError:
        block, size = GGML_QUANT_SIZES[kind]
        rng = np.random.default_rng(array.size)
        blocks = rng.integers(0, 256, (array.size // block, size), np.uint8)
        if kind.name == "IQ1_M":
            # A digit of the scale stands in each of the last four words.
            blocks[:, 49::2] = blocks[:, 49::2] & 15 | np.array([0xE0, 0x80, 0xA0, 0x00], np.uint8)
            return blocks.reshape(array.shape[0], -1)
        scales = blocks[:, _SCALES.get(kind.name, slice(2))]
        small = np.array([2e-4, 1e-4], "<f2").view(np.uint8)[: scales.shape[1]]
        scales[:] = scales & 15 if kind.name == "NVFP4" else small
        return blocks.reshape(array.shape[0], -1)


def write_gguf(
    path: Path,
    kinds: Mapping[str, str] | None = None,
    architecture: str = "llama",
    model: Any = None,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
    arrays: Mapping[str, np.ndarray[Any, Any]] | None = None,
    permuted: bool | None = None,
    parts: int = 0,
) -> dict[str, np.ndarray[Any, Any]]:
    """Write a model with random weights; return what each tensor holds after quantisation, by mlx-lm's name.

    `kinds`: the quantisation of each matrix whose GGUF name contains the key; F32 without one, or for rows that are
    no whole blocks.
    `metadata` replaces entries (None removes one); `extra`: further tensors; `arrays`: in place of the model's weights,
    by their names in the file; `permuted`: q and k are, as Llama's; `parts`: so many tensors a file.
    """
    model = model if model is not None else network(architecture, **SIZES)
    arguments: Any = getattr(model, "args", model)
    permuted = architecture == "llama" if permuted is None else permuted
    counts = {"attn_q": arguments.num_attention_heads, "attn_k": arguments.num_key_value_heads} if permuted else {}
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=parts)
    for key, value in {**_metadata(arguments, architecture), **(metadata or {})}.items():
        add_entry(writer, key, value)
    held: dict[str, np.ndarray[Any, Any]] = {}
    for name, array in (weights(model) if arrays is None else arrays).items():
        short = name if arrays is not None else gguf_name(name, architecture)
        heads = counts.get(short.split(".")[-2])
        stored = array if heads is None else interleaved(array, heads)
        wanted = next((kind for key, kind in (kinds or {}).items() if key in short and array.ndim > 1), "F32")
        kind = GGMLQuantizationType[wanted]
        if array.shape[-1] % GGML_QUANT_SIZES[kind][0]:
            kind = GGMLQuantizationType.F32
        data = quantized(np.ascontiguousarray(stored), kind)
        writer.add_tensor(short, data, raw_dtype=kind)
        back = gguf.quants.dequantize(data, kind).reshape(array.shape)
        held[name] = back if heads is None else separated(back, heads)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def separated(array: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The inverse of `interleaved`."""
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _metadata(arguments: Any, architecture: str) -> dict[str, Any]:
    head = arguments.hidden_size // arguments.num_attention_heads
    entries = {
        "block_count": arguments.num_hidden_layers,
        "context_length": getattr(arguments, "max_position_embeddings", 512),
        "embedding_length": arguments.hidden_size,
        "feed_forward_length": arguments.intermediate_size,
        "attention.head_count": arguments.num_attention_heads,
        "attention.head_count_kv": arguments.num_key_value_heads,
        "attention.key_length": getattr(arguments, "head_dim", None) or head,
        "rope.freq_base": float(getattr(arguments, "rope_theta", 10_000.0)),
        "attention.layer_norm_rms_epsilon": float(getattr(arguments, "rms_norm_eps", 1e-5)),
    }
    return {**{f"{architecture}.{key}": value for key, value in entries.items()}, **tokenizer_metadata()}


def tokenizer_metadata() -> dict[str, Any]:
    """The entries of a byte-level tokenizer with `vocabulary`."""
    tokens = vocabulary()
    types = [1] * 262 + [3, 3, 4, 3] + [5] * 6
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": _MERGES,
        "tokenizer.ggml.bos_token_id": START,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def add_entry(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add an entry of the type of its value; none for None."""
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case str():
            writer.add_string(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case _:
            writer.add_array(key, value)
