"""A checkpoint to be converted: an mlx-lm decoder as plain arrays by Llama's names, sizes and ropes. Knows no graph."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.smollm3 import NoPE

from draft_worker.coreml.conversion.architectures import Architecture, architecture_of, known
from draft_worker.coreml.converted import Rotation
from draft_worker.coreml.package import DecoderShape, Half, Layer, Single
from draft_worker.short_head import HeadTokens, read_head_tokens
from protocol.errors import InputError
from protocol.inference.packed_weights import dequantized
from protocol.inference.stored_model import load_network

_PROBED = 64
"""Positions at which two ropes that differ are told apart."""
_ROTATED = ("q_proj", "k_proj", "q_norm", "k_norm")
"""Parameters whose rows are features of queries and keys."""


class Checkpoint:
    """A decoder of one of the known architectures, as plain arrays by Llama's names, sizes and ropes.

    `network`: a loaded mlx-lm model; quantised weights are dequantised. `config`: the content of config.json; without
    one, what the model keeps of it. `head_tokens`: the tokens of the head if it has only some. Raises InputError for
    any other architecture, and for one in a form that can't be converted.
    """

    def __init__(
        self,
        network: Any,
        folder: Path = Path(),
        head_tokens: HeadTokens | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        # Models with pictures hold the decoder as their language model; the converter takes the decoder alone.
        network = getattr(network, "language_model", network)
        architecture = architecture_of(network)
        if architecture is None:
            raise _refusal(folder, f"its architecture is {type(network).__module__.split('.')[-1]}")
        try:
            structure = read_structure(network, architecture, config or {})
        except NotConvertible as error:
            raise _refusal(folder, str(error)) from error
        parameters = dict(tree_flatten(dequantized(network).parameters()))
        self.folder = folder
        self.shape: DecoderShape = structure.shape
        self.head_tokens = head_tokens
        self._reordered = structure.order != list(range(structure.shape.head))
        """Whether the features of queries and keys are in another order than the model's."""
        self._structure = structure
        self._arrays = dict(_canonical(parameters, architecture, structure.shape))

    @classmethod
    def load(cls, folder: Path) -> "Checkpoint":
        """The model in a folder of config.json and model*.safetensors; code in the folder is never run."""
        network, config = load_network(folder)
        vocabulary = getattr(network, "language_model", network).args.vocab_size
        return cls(network, folder, read_head_tokens(folder, vocabulary), config)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def half(self, name: str) -> Half:
        """A parameter by Llama's name, rounded to fp16. Raises InputError for numbers beyond fp16's range."""
        with np.errstate(over="ignore"):
            array = np.array(self._arrays[name].astype(mx.float32)).astype(np.float16)
        if not np.isfinite(array).all():
            raise InputError(
                f"{name} of {self.folder} has numbers beyond fp16's range, the Neural Engine's only type: "
                "use the MLX draft engine for this model."
            )
        if self._reordered and name.split(".")[-2] in _ROTATED:
            return reorder(array, self._structure.order)
        return array

    def head(self) -> tuple[str, Half]:
        """The name of the head's parameter, and its rows in the order of the logits."""
        name = "lm_head.weight" if "lm_head.weight" in self else "model.embed_tokens.weight"
        rows = self.half(name)
        whole = self.head_tokens is None or len(rows) == len(self.head_tokens)
        return name, rows if whole else rows[self.head_tokens]

    @property
    def head_rows(self) -> int:
        return self.shape.vocabulary if self.head_tokens is None else len(self.head_tokens)

    def rotations(self, context: int) -> list[Rotation]:
        """What each of mlx-lm's different ropes applies at the positions below `context`."""
        return [Rotation.measure(rope, self._structure.order, context) for rope in self._structure.ropes]

    def position_scale(self, context: int) -> Single | None:
        """The factors of the queries at the positions below `context`; None if all are 1."""
        scale = self._structure.position_scale(context)
        return None if scale is None or (scale == 1).all() else scale

    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) over every parameter's name and fp16 bytes, the rotations and the head's tokens."""
        digest = hashlib.sha256()
        for name in sorted(self._arrays):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(self.half(name)).data)
        for rotation in self.rotations(min(self.shape.positions, 64)):
            for table in rotation:
                digest.update(table.data)
        if self.head_tokens is not None:
            digest.update(self.head_tokens.data)
        return digest.hexdigest()


def _canonical(
    parameters: Mapping[str, mx.array], architecture: Architecture, shape: DecoderShape
) -> Iterator[tuple[str, mx.array]]:
    """The parameters by Llama's names: renamed, fused matrices divided, and norms with their offset."""
    for given, array in parameters.items():
        *path, part, kind = [architecture.names.get(component, component) for component in given.split(".")]
        if part.endswith("norm"):
            array = array.astype(mx.float32) + architecture.norm_offset
        names = architecture.fused.get(part, (part,))
        for name, rows in zip(names, _divided(array, names, shape), strict=True):
            yield ".".join([*path, name, kind]), rows


def _divided(array: mx.array, names: tuple[str, ...], shape: DecoderShape) -> Iterator[mx.array]:
    """The rows of each of `names`, in this order."""
    if names == ("q_proj", "k_proj", "v_proj"):
        sizes = [shape.head * heads for heads in (shape.heads, shape.key_heads, shape.key_heads)]
    else:
        sizes = [len(array) // len(names)] * len(names)
    begin = 0
    for size in sizes:
        yield array[begin : begin + size]
        begin += size


def _refusal(folder: Path, reason: str) -> InputError:
    return InputError(
        f"The model in {folder} can't be converted ({reason}): "
        f"choose one of the architectures {known()}, or use the MLX draft engine."
    )


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


def pair_order(head: int, rotated: int, interleaved: bool) -> list[int]:
    """A head's features in the order of the package: feature `order[i]` and `order[i + head / 2]` are a pair.

    `rotated`: the first features, which rope rotates; the others form pairs that keep their values. `interleaved`:
    rope pairs features (0, 1), (2, 3), ... instead of (i, i + rotated / 2). Both numbers are even.
    """
    features, rest = list(range(rotated)), list(range(rotated, head))
    first, second = (
        (features[::2], features[1::2]) if interleaved else (features[: rotated // 2], features[rotated // 2 :])
    )
    return [*first, *rest[: len(rest) // 2], *second, *rest[len(rest) // 2 :]]


def reorder(rows: Half, order: Sequence[int]) -> Half:
    """The rows of a projection to queries or keys, its biases, or a head norm's weights, each head in `order`.

    Queries and keys are reordered alike, so their products stay the same.
    """
    return np.ascontiguousarray(rows.reshape(-1, len(order), *rows.shape[1:])[:, order]).reshape(rows.shape)
