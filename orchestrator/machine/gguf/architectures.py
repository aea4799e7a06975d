"""GGUF's architectures in mlx-lm's terms: config.json, the tensors' names, the order of their rows.

Knows no bytes of a tensor but those of a few rope factors.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from orchestrator.machine.gguf.container import GgufFile, GgufTensor
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


_EXPERTS = {f"ffn_{each}_exps": f"{each}_proj" for each in ("gate", "up", "down")}
_BEFORE_AND_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Norms of a layer of Gemma behind its first one."""


def _named_experts(module: str) -> dict[str, str]:
    return {name: f"{module}.{each}" for name, each in _EXPERTS.items()}


def _nothing(_: "_Values") -> dict[str, Any]:
    return {}


def _gemma_scale(values: "_Values", largest: int) -> float:
    """Queries are scaled by a head's size, but in the model with most layers by the width of a head's share."""
    hidden, heads = values.integer("embedding_length"), values.integer("attention.head_count")
    head = values.integer("attention.key_length", hidden // heads)
    return hidden / heads if values.integer("block_count") == largest else head


def _gemma2(values: "_Values") -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _gemma_scale(values, 46),
        "attn_logit_softcapping": values.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.number("final_logit_softcapping", 30.0),
    }


def _gemma3(values: "_Values") -> dict[str, Any]:
    values.require_none("final_logit_softcapping")
    return {
        "query_pre_attn_scalar": _gemma_scale(values, 62),
        "rope_theta": values.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": values.number("rope.freq_base_swa", 10_000.0),
        "sliding_window": values.integer("attention.sliding_window"),
        # Newer files name each layer, in the same order.
        "sliding_window_pattern": 6,
    }


def _qwen3_moe(values: "_Values") -> dict[str, Any]:
    return {
        "num_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _gpt_oss(values: "_Values") -> dict[str, Any]:
    return {
        "num_local_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "intermediate_size": values.integer("expert_feed_forward_length"),
        "sliding_window": values.integer("attention.sliding_window"),
        "layer_types": [
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(values.integer("block_count"))
        ],
    }


def _granite(values: "_Values") -> dict[str, Any]:
    head = values.integer("embedding_length") // values.integer("attention.head_count")
    fields = {
        "attention_multiplier": values.number("attention.scale", head**-0.5),
        "embedding_multiplier": values.number("embedding_scale", 1.0),
        "residual_multiplier": values.number("residual_scale", 1.0),
        "logits_scaling": values.number("logit_scale", 1.0),
    }
    if not (experts := values.get("expert_count", 0)):
        return fields
    return {**fields, "num_local_experts": experts, "num_experts_per_tok": values.integer("expert_used_count")}


def _ministral3(values: "_Values") -> dict[str, Any]:
    scaling = _rope_scaling(values, 0).get("rope_scaling") or {"type": "default"}
    log = values.get("rope.scaling.yarn_log_multiplier")
    # Both parts of the scale are the same, so that they cancel out.
    scales = {} if log is None else {"mscale": float(log), "mscale_all_dim": float(log)}
    original = scaling.get("original_max_position_embeddings", values.integer("context_length"))
    return {
        "rope_parameters": {
            **scaling,
            **scales,
            "rope_theta": values.number("rope.freq_base", 10_000.0),
            "original_max_position_embeddings": original,
            "llama_4_scaling_beta": float(values.get("attention.temperature_scale", 0.0)),
        }
    }


def _glm4(values: "_Values") -> dict[str, Any]:
    # With sections for pictures, rows of q and k are in another order.
    values.require_none("rope.dimension_sections")
    return {}


def _lfm2(values: "_Values") -> dict[str, Any]:
    heads = values.get("attention.head_count_kv")
    if not isinstance(heads, np.ndarray) or len(heads) != values.integer("block_count"):
        raise values.wrong("attention.head_count_kv", heads)
    return {
        "num_key_value_heads": int(heads.max()),
        "layer_types": ["full_attention" if count else "conv" for count in heads.tolist()],
        "norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": values.integer("shortconv.l_cache"),
        "conv_bias": "blk.0.shortconv.conv.bias" in values.file.tensors,
        "block_dim": values.integer("embedding_length"),
        "block_ff_dim": values.integer("feed_forward_length"),
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    }


class Architecture(NamedTuple):
    """`model_type`: mlx-lm's name."""

    model_type: str
    inner: Mapping[str, str] = _INNER
    """A layer's tensors, without `.weight` and `.bias`."""
    outer: Mapping[str, str] = _OUTER
    fields: Callable[["_Values"], dict[str, Any]] = _nothing
    """Fields of config.json beside those that all have, or in their place."""
    permuted: bool = False
    """Rows of q and k alternate between the halves of a head, which mlx-lm has one after the other."""
    partial: bool = False
    """Only a part of a head may be rotated."""
    experts: bool = False
    """It is a mixture of experts."""
    norm_offset: float = 0.0
    """What the file adds to the weights of norms."""


_QWEN3 = _INNER | _NORMED_HEADS
_SPARSE = {"ffn_gate_inp": "mlp.gate", **_named_experts("mlp.switch_mlp")}
_ARCHITECTURES = {
    "llama": Architecture("llama", permuted=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", _QWEN3),
    "qwen3moe": Architecture("qwen3_moe", _QWEN3 | _SPARSE, fields=_qwen3_moe, experts=True),
    "phi3": Architecture("phi3", _INNER | _FUSED, partial=True),
    "gemma": Architecture("gemma", norm_offset=1.0),
    "gemma2": Architecture("gemma2", _INNER | _BEFORE_AND_BEHIND, fields=_gemma2, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", _QWEN3 | _BEFORE_AND_BEHIND, fields=_gemma3, norm_offset=1.0),
    "gpt-oss": Architecture(
        "gpt_oss",
        {
            **_INNER,
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            **_named_experts("mlp.experts"),
        },
        fields=_gpt_oss,
        experts=True,
    ),
    "granite": Architecture("granite", fields=_granite, permuted=True),
    "granitemoe": Architecture(
        "granitemoe",
        {
            **_INNER,
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            **_named_experts("block_sparse_moe.switch_mlp"),
        },
        fields=_granite,
        permuted=True,
        experts=True,
    ),
    "lfm2": Architecture(
        "lfm2",
        {
            **_INNER,
            "attn_norm": "operator_norm",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "attn_output": "self_attn.out_proj",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_down": "feed_forward.w2",
            "ffn_up": "feed_forward.w3",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
        },
        _OUTER | {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"},
        _lfm2,
    ),
    "glm4": Architecture(
        "glm4",
        {
            **_INNER,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        fields=_glm4,
        partial=True,
    ),
    "mistral3": Architecture("ministral3", fields=_ministral3, permuted=True),
    "smollm3": Architecture("smollm3", permuted=True),
}
"""By GGUF's name. Mistral's models are llama in both."""


def architecture_of(file: GgufFile) -> Architecture:
    """Raises InputError for an architecture that is not known here."""
    name = file.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise InputError(
            f"{file.path} is of the architecture {name!r}, which can't be read from GGUF: known are "
            f"{', '.join(_ARCHITECTURES)}. Pass the model in mlx-lm's format instead."
        )
    return _ARCHITECTURES[name]


def model_config(file: GgufFile) -> dict[str, Any]:
    """config.json without quantisation and tokens. Raises InputError for an architecture that is not known here."""
    architecture, name = architecture_of(file), str(file.metadata["general.architecture"])
    values = _Values(file, name)
    if values.get("expert_count", 0) and not architecture.experts:
        raise InputError(f"{file.path} is a mixture of experts, which can't be read from GGUF: pass a folder.")
    fields = architecture.fields(values)
    hidden, heads = values.integer("embedding_length"), values.integer("attention.head_count")
    head = values.integer("attention.key_length", hidden // max(heads, 1))
    rotated = values.integer("rope.dimension_count", head)
    if rotated != head and not architecture.partial:
        raise InputError(f"{file.path} rotates {rotated} of a head's {head} dimensions, which {name} does not do.")
    shared = {
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": values.integer("block_count"),
        "num_attention_heads": heads,
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
    if "num_key_value_heads" not in fields:
        shared["num_key_value_heads"] = values.integer("attention.head_count_kv", heads)
    if "intermediate_size" not in fields:
        # In a mixture of experts it may be that of an expert alone.
        shared["intermediate_size"] = values.integer("feed_forward_length", fields.get("moe_intermediate_size"))
    config = shared | fields
    _require_shapes(file, config)
    return config


def tensor_name(file: GgufFile, name: str) -> str | None:
    """mlx-lm's name of a tensor; None for one that config.json replaces. Raises InputError for an unknown one."""
    if name in _ROPE_TENSORS:
        return None
    architecture = architecture_of(file)
    stem, dot, kind = name.rpartition(".")
    layer = _LAYER.fullmatch(stem)
    if kind in ("weight", "bias") and layer and layer[2] in architecture.inner:
        inner = architecture.inner[layer[2]]
        suffix = "" if inner.endswith(".sinks") else f"{dot}{kind}"
        return f"model.layers.{layer[1]}.{inner}{suffix}"
    if kind in ("weight", "bias") and stem in architecture.outer:
        return f"{architecture.outer[stem]}{dot}{kind}"
    raise InputError(
        f"{file.path} has a tensor {name!r}, which its architecture does not have: pass the model in mlx-lm's format."
    )


def stored_shape(tensor: GgufTensor) -> tuple[int, ...]:
    """The shape that mlx-lm expects: a convolution has one channel a group."""
    return (*tensor.shape, 1) if ".shortconv.conv." in tensor.name and len(tensor.shape) > 1 else tensor.shape


def row_order(architecture: Architecture, config: Mapping[str, Any], name: str) -> Any:
    """Where the rows of a tensor (by its GGUF name) stand in the file, in mlx-lm's order; None if they are in order.

    GGUF's converter interleaves the two halves of each head of q and k, for a rope that turns neighbours.
    """
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None or not architecture.permuted:
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
            raise self.wrong(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or not value > 0:
            raise self.wrong(key, value)
        return float(value)

    def require_none(self, key: str) -> None:
        """Raises InputError for a value of which mlx-lm's architecture knows nothing."""
        if self.get(key) is not None:
            raise InputError(
                f"{self.file.path} states {self.architecture}.{key}, which mlx-lm does not compute: choose another."
            )

    def wrong(self, key: str, value: object) -> InputError:
        """That a value is missing or can't be used."""
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
