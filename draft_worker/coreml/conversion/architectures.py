"""How mlx-lm's decoders differ from its Llama: one entry for each architecture that can be converted.

A layer's kind, window, rope and scale are read from the layer itself (`checkpoint.py`); here is what it does not tell.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import gemma2, gemma3_text, lfm2, llama, ministral3, phi3, qwen2, qwen3, smollm3

from draft_worker.coreml.package import Activation


class Architecture(NamedTuple):
    """A module of mlx-lm. The defaults are Llama's."""

    network: type
    names: Mapping[str, str] = {}
    """Components of parameters' names, with Llama's names for them. Llama has no norms behind attention and MLP; here
    they are called attention_output_norm and mlp_output_norm."""
    fused: Mapping[str, tuple[str, ...]] = {}
    """Matrices whose rows are several of Llama's, in this order."""
    norm_offset: float = 0.0
    """Added to the weights of every norm."""
    epsilon: str = "rms_norm_eps"
    activation: Activation = "silu"
    embedding_scale: Callable[[int], float] = lambda _: 1.0
    """The factor of the embeddings, by their size."""
    score_cap: str = ""
    """The field that holds the cap of attention scores; empty: none."""
    logit_cap: str = ""
    clips: bool = False
    """Whether sums of the residual stream beyond fp16's range are set to its largest number."""


_GEMMA_NAMES = {
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_output_norm",
}
_LFM2_NAMES = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "embedding_norm": "norm",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "out_proj": "o_proj",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
}


def _in_bfloat16(size: int) -> float:
    """Gemma 3 computes the factor in bfloat16, whatever the weights' type."""
    rounded: Any = mx.array(size**0.5, mx.bfloat16).item()
    return float(rounded)


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(llama.Model),
    Architecture(qwen2.Model),
    Architecture(qwen3.Model),
    Architecture(ministral3.Model),
    Architecture(smollm3.Model),
    Architecture(
        phi3.Model,
        fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    ),
    Architecture(
        gemma2.Model,
        names=_GEMMA_NAMES,
        norm_offset=1.0,
        activation="gelu",
        embedding_scale=lambda size: size**0.5,
        score_cap="attn_logit_softcapping",
        logit_cap="final_logit_softcapping",
    ),
    Architecture(
        gemma3_text.Model,
        names=_GEMMA_NAMES,
        norm_offset=1.0,
        activation="gelu",
        embedding_scale=_in_bfloat16,
        clips=True,
    ),
    Architecture(lfm2.Model, names=_LFM2_NAMES, epsilon="norm_eps"),
)


def architecture_of(network: Any) -> Architecture | None:
    """The entry for a loaded mlx-lm model; None if it can't be converted."""
    return next((entry for entry in ARCHITECTURES if isinstance(network, entry.network)), None)


def known() -> str:
    """The architectures that can be converted, for a message."""
    return ", ".join(entry.network.__module__.split(".")[-1] for entry in ARCHITECTURES)
