"""GGUF's architectures in mlx-lm's terms: config.json, the tensors' names, the order of their rows.

Knows no bytes of a tensor but those of a few rope factors.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from orchestrator.machine.gguf.container import GgufFile
from orchestrator.machine.gguf.weights import floats
from protocol.errors import InputError

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMED_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""They become settings of config.json."""
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of every Llama 3; the file has only the factors that result."""
_TOLERANCE = 1e-3


class _Architecture(NamedTuple):
    inner: Mapping[str, str] = _INNER
    """A layer's tensors, without `.weight` and `.bias`."""
    permuted: bool = False
    """Rows of q and k alternate between the halves of a head, which mlx-lm has one after the other."""
    partial: bool = False
    """Only a part of a head may be rotated."""


_ARCHITECTURES = {
    "llama": _Architecture(permuted=True),
    "qwen2": _Architecture(),
    "qwen3": _Architecture(_INNER | _NORMED_HEADS),
    "phi3": _Architecture(_INNER | _FUSED, partial=True),
}
"""By GGUF's name, which is also mlx-lm's. Mistral's models are llama in both."""


def model_config(file: GgufFile) -> dict[str, Any]:
    """config.json without quantisation and tokens. Raises InputError for an architecture that is not known here."""
    name = file.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise InputError(
            f"{file.path} is of the architecture {name!r}, which can't be read from GGUF: known are "
            f"{', '.join(_ARCHITECTURES)}. Pass the model in mlx-lm's format instead."
        )
    values = _Values(file, name)
    if values.get("expert_count", 0):
        raise InputError(f"{file.path} is a mixture of experts, which can't be read from GGUF: pass a folder.")
    hidden, heads = values.integer("embedding_length"), values.integer("attention.head_count")
    head = values.integer("attention.key_length", hidden // max(heads, 1))
    rotated = values.integer("rope.dimension_count", head)
    if rotated != head and not _ARCHITECTURES[name].partial:
        raise InputError(f"{file.path} rotates {rotated} of a head's {head} dimensions, which {name} does not do.")
    config = {
        "model_type": name,
        "hidden_size": hidden,
        "num_hidden_layers": values.integer("block_count"),
        "intermediate_size": values.integer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.integer("attention.head_count_kv", heads),
        "head_dim": head,
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": _vocabulary(file),
        "max_position_embeddings": values.integer("context_length"),
        "rope_theta": values.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "partial_rotary_factor": rotated / head,
        **_rope_scaling(values, rotated),
    }
    _require_shapes(file, config)
    return config


def tensor_name(file: GgufFile, name: str) -> str | None:
    """mlx-lm's name of a tensor; None for one that config.json replaces. Raises InputError for an unknown one."""
    if name in _ROPE_TENSORS:
        return None
    stem, dot, kind = name.rpartition(".")
    layer = _LAYER.fullmatch(stem)
    known = _ARCHITECTURES[file.metadata["general.architecture"]].inner
    if kind in ("weight", "bias") and layer and layer[2] in known:
        return f"model.layers.{layer[1]}.{known[layer[2]]}{dot}{kind}"
    if kind in ("weight", "bias") and stem in _OUTER:
        return f"{_OUTER[stem]}{dot}{kind}"
    raise InputError(
        f"{file.path} has a tensor {name!r}, which its architecture does not have: pass the model in mlx-lm's format."
    )


def row_order(config: Mapping[str, Any], name: str) -> Any:
    """Where the rows of a tensor (by its GGUF name) stand in the file, in mlx-lm's order; None if they are in order.

    GGUF's converter interleaves the two halves of each head of q and k, for a rope that turns neighbours.
    """
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None or not _ARCHITECTURES[config["model_type"]].permuted:
        return None
    count, head = config[heads], config["head_dim"]
    return np.arange(count * head).reshape(count, head // 2, 2).swapaxes(1, 2).reshape(-1)


class _Values:
    """Metadata of one architecture. Raises InputError for a missing value and for one of another type."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        if not isinstance(value, int) or value < 1:
            raise self._wrong(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or not value > 0:
            raise self._wrong(key, value)
        return float(value)

    def _wrong(self, key: str, value: object) -> InputError:
        words = "is missing" if value is None else "has a value that can't be used"
        return InputError(f"{self.file.path}: the metadata {self.architecture}.{key} {words}: download another file.")


def _vocabulary(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise InputError(f"{file.path} has no token embedding, so it is no language model: choose another file.")
    return file.tensors["token_embd.weight"].shape[0]


def _require_shapes(file: GgufFile, config: Mapping[str, Any]) -> None:
    """Raises InputError if the heads of the metadata are not those of the tensors, which the rows' order relies on."""
    for name, heads in (("blk.0.attn_q.weight", "num_attention_heads"), ("blk.0.attn_k.weight", "num_key_value_heads")):
        tensor = file.tensors.get(name)
        if tensor is not None and tensor.shape != (config[heads] * config["head_dim"], config["hidden_size"]):
            raise InputError(f"{file.path}: {name} has the shape {tensor.shape}, against its metadata: download again.")


def _rope_scaling(values: _Values, rotated: int) -> dict[str, Any]:
    """The fields of config.json that scale positions; none if they are not scaled."""
    factors = {name: values.file.tensors.get(name) for name in _ROPE_TENSORS}
    freqs, long, short = ([] if each is None else _factors(each) for each in factors.values())
    if freqs:
        return {"rope_scaling": _llama3(values, np.array(freqs), rotated)}
    if long and short:
        original = values.integer("rope.scaling.original_context_length")
        longrope = {"type": "longrope", "long_factor": long, "short_factor": short}
        return {"rope_scaling": longrope, "original_max_position_embeddings": original}
    kind = values.get("rope.scaling.type", "none")
    if kind not in _SCALINGS:
        raise InputError(f"{values.file.path} scales positions by {kind!r}, which is not known: pass a folder.")
    return _SCALINGS[kind](values)


def _factors(tensor: Any) -> list[float]:
    return [float(each) for each in floats(np.ascontiguousarray(tensor.rows), tensor.kind).reshape(-1)]


def _llama3(values: _Values, found: Any, rotated: int) -> dict[str, Any]:
    """The rule whose result `found` is (Llama 3.1). Raises InputError if it is another rule's."""
    base, factor = values.number("rope.freq_base", 10_000.0), float(found.max())
    lengths = 2 * np.pi * base ** (np.arange(0, rotated, 2) / rotated)
    turns = _LLAMA3["original_max_position_embeddings"] / lengths
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=_TOLERANCE):
        raise InputError(f"{values.file.path} scales its rope in an unknown way: pass the model in mlx-lm's format.")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _linear(values: _Values) -> dict[str, Any]:
    return {"rope_scaling": {"type": "linear", "factor": values.number("rope.scaling.factor")}}


def _yarn(values: _Values) -> dict[str, Any]:
    original = values.integer("rope.scaling.original_context_length")
    factor = values.number("rope.scaling.factor")
    return {"rope_scaling": {"type": "yarn", "factor": factor, "original_max_position_embeddings": original}}


_SCALINGS: dict[str, Callable[[_Values], dict[str, Any]]] = {
    "none": lambda _: {},
    "linear": _linear,
    "yarn": _yarn,
}
