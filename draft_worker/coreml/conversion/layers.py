"""The shape of a loaded mlx-lm decoder, read from its layers and fields. Reads no weights."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from mlx_lm.models.smollm3 import NoPE

from draft_worker.coreml.arrays import Single
from draft_worker.coreml.conversion.architectures import Architecture
from draft_worker.coreml.package import DecoderShape, Layer
from draft_worker.coreml.rotation import Rotation, pair_order

_PROBED = 64
"""Positions at which two ropes that differ are told apart."""


class NotConvertible(Exception):
    """The text names the field of config.json that states what the converter can't do."""


class Structure(NamedTuple):
    shape: DecoderShape
    order: list[int]
    """The features of a head in the package's order (`pair_order`)."""
    ropes: list[Any]
    """The different ropes, by `Layer.rotation`."""
    llama4: tuple[float, int] | None
    """Llama 4's scaling of queries: beta, and the positions after which the factor grows."""

    def position_scale(self, context: int) -> Single | None:
        """The factors at the positions below `context`: 1 + beta ln(1 + floor(position / original)), as in mlx-lm."""
        if self.llama4 is None:
            return None
        beta, original = self.llama4
        steps = np.arange(context, dtype=np.float32) // np.float32(original)
        return 1 + np.float32(beta) * np.log1p(steps)


def read_structure(network: Any, architecture: Architecture, config: Mapping[str, Any]) -> Structure:
    """Raises NotConvertible. `config`: fields that the model's own arguments may lack."""
    fields = network.args
    attentions = [layer.self_attn for layer in network.layers if hasattr(layer, "self_attn")]
    if not attentions:
        raise NotConvertible("layer_types has no layer with attention")
    heads, key_heads = attentions[0].n_heads, attentions[0].n_kv_heads
    if heads % key_heads:
        raise NotConvertible("num_attention_heads is no multiple of num_key_value_heads")
    positions = getattr(fields, "max_position_embeddings", None) or config.get("max_position_embeddings")
    if not positions:
        raise NotConvertible("its config.json states no max_position_embeddings")
    head = _head(attentions[0], heads, key_heads)
    order = _order(attentions, head)
    ropes, layers = _layers(network.layers, order)
    shape = DecoderShape(
        architecture=fields.model_type,
        layers=tuple(layers),
        hidden=fields.hidden_size,
        heads=heads,
        key_heads=key_heads,
        head=head,
        vocabulary=fields.vocab_size,
        positions=positions,
        epsilon=getattr(fields, architecture.epsilon),
        score_scale=attentions[0].scale,
        window=_window(fields, layers),
        taps=_taps(network.layers, fields, heads * head),
        activation=architecture.activation,
        embedding_scale=architecture.embedding_scale(fields.hidden_size),
        score_cap=getattr(fields, architecture.score_cap, None),
        logit_cap=getattr(fields, architecture.logit_cap, None),
        clips=architecture.clips,
    )
    return Structure(shape, order, ropes, _llama4(fields))


def _head(attention: Any, heads: int, key_heads: int) -> int:
    if hasattr(attention, "qkv_proj"):
        return attention.qkv_proj.weight.shape[0] // (heads + 2 * key_heads)
    return attention.q_proj.weight.shape[0] // heads


def _order(attentions: Sequence[Any], head: int) -> list[int]:
    """The order of a head's features, which all layers must share, because the graph rotates all alike."""
    pairings = {_pairing(attention.rope, head) for attention in attentions if not isinstance(attention.rope, NoPE)}
    if len(pairings) > 1:
        raise NotConvertible("partial_rotary_factor differs between its layers")
    rotated, interleaved = next(iter(pairings), (head, False))
    if rotated % 2 or head % 2:
        raise NotConvertible("partial_rotary_factor and head_dim give an odd number of rotated features")
    return pair_order(head, rotated, interleaved)


def _pairing(rope: Any, head: int) -> tuple[int, bool]:
    """How many features a rope rotates, and whether their pairs are interleaved."""
    rotated = getattr(rope, "dims", None) or getattr(rope, "dim", head)
    return rotated, bool(getattr(rope, "traditional", False))


def _layers(given: Sequence[Any], order: list[int]) -> tuple[list[Any], list[Layer]]:
    """The different ropes, and the kind of each layer."""
    ropes: dict[bytes, Any] = {}
    layers: list[Layer] = []
    for layer in given:
        attention = getattr(layer, "self_attn", None)
        if attention is None:
            layers.append(Layer(rotation=None, convolution=True))
            continue
        rotation = None
        if not isinstance(attention.rope, NoPE):
            tables = Rotation.measure(attention.rope, order, _PROBED)
            key = tables.cosine.tobytes() + tables.sine.tobytes()
            ropes.setdefault(key, attention.rope)
            rotation = list(ropes).index(key)
        sliding = getattr(layer, "use_sliding", False) or getattr(attention, "is_sliding", False)
        layers.append(Layer(rotation=rotation, sliding=bool(sliding)))
    return list(ropes.values()), layers


def _window(fields: Any, layers: Sequence[Layer]) -> int | None:
    if not any(layer.sliding for layer in layers):
        return None
    if not fields.sliding_window:
        raise NotConvertible("layer_types has sliding layers, but sliding_window states no window")
    return fields.sliding_window


def _taps(layers: Sequence[Any], fields: Any, width: int) -> int:
    """`width`: numbers in the keys of all query heads, which the cache's rows can hold."""
    taps = {layer.conv.L_cache for layer in layers if not hasattr(layer, "self_attn")}
    if not taps:
        return 0
    if min(taps) < 2:
        raise NotConvertible("conv_L_cache is below 2")
    if fields.hidden_size != width:
        raise NotConvertible("hidden_size is no multiple of num_attention_heads")
    return taps.pop()


def _llama4(fields: Any) -> tuple[float, int] | None:
    rope = getattr(fields, "rope_parameters", None) or {}
    if "llama_4_scaling_beta" not in rope:
        return None
    return rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]
