"""Heads for multi-token prediction, from the target's own checkpoint: Qwen3-Next and Qwen3.5, DeepSeek-V3 and GLM-4.5.

The decoder layer is mlx-lm's own class of the architecture. mlx-lm's conversions drop these tensors, so they come from
the original checkpoint, or from a folder with its config.json and nothing but them. Knows no trees.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from draft_worker.drafters.files import DrafterFolder
from draft_worker.short_head import HeadTokens
from protocol.contracts.drafters.description import MtpForm
from protocol.contracts.drafters.mtp import DEEPSEEK, FAMILIES, QWEN
from protocol.contracts.model_config import translated
from protocol.inference.stored_model import defaults_of

Tensors = dict[str, mx.array]
Ends = Callable[[mx.array], mx.array]


_QWEN = MappingProxyType(
    {
        "mtp.pre_fc_norm_embedding.weight": "embedding_norm.weight",
        "mtp.pre_fc_norm_hidden.weight": "hidden_norm.weight",
        "mtp.fc.weight": "fc.weight",
        "mtp.norm.weight": "norm.weight",
    }
)
_DEEPSEEK = MappingProxyType(
    {
        "enorm.weight": "embedding_norm.weight",
        "hnorm.weight": "hidden_norm.weight",
        "eh_proj.weight": "fc.weight",
        "shared_head.norm.weight": "norm.weight",
    }
)
_NAMES = MappingProxyType({QWEN: _QWEN, DEEPSEEK: _DEEPSEEK})
"""Our names of the tensors beside the decoder layer, by the published ones."""
_FORMS = MappingProxyType({QWEN: {"full_attention_interval": 1}, DEEPSEEK: {"first_k_dense_replace": 0}})
"""Fields with which mlx-lm's class makes the head's decoder layer as the layer of index 0."""


class MtpHead(nn.Module):
    """Row i joins the target's last state behind token i, after the final norm, with the embedding of token i + 1."""

    head_tokens: HeadTokens | None = None

    def __init__(self, layer: nn.Module, width: int, eps: float) -> None:
        super().__init__()
        self.embedding_norm = nn.RMSNorm(width, eps=eps)
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layer = layer
        self.norm = nn.RMSNorm(width, eps=eps)
        self._embed: Ends | None = None
        self._head: Ends | None = None

    def borrow(self, embed: Ends, head: Ends) -> None:
        """Use the target's embedding and head."""
        self._embed, self._head = embed, head

    def fuse(self, features: mx.array) -> mx.array:
        """Features are read as they are."""
        return features

    def __call__(self, tokens: mx.array, hidden: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """(B, L, width), the normed output, which stands in for the next state."""
        assert self._embed is not None, "the target's embedding was not given"
        parts = [self.embedding_norm(self._embed(tokens)), self.hidden_norm(hidden)]
        x = self.fc(mx.concatenate(parts, axis=-1))
        layer: Any = self.layer
        return self.norm(layer(x, create_attention_mask(x, cache, return_array=True) if mask is None else mask, cache))

    def logits(self, hidden: mx.array) -> mx.array:
        assert self._head is not None, "the target's head was not given"
        return self._head(hidden)

    def make_cache(self) -> list[Any]:
        return [KVCache()]


def read_mtp(folder: Path) -> tuple[MtpHead, Mapping[str, Any]]:
    """The first head in a checkpoint, and the config of the text model that it belongs to.

    Raises InputError for a checkpoint without a head, or of an unknown or damaged form.
    """
    found = DrafterFolder(folder, MtpForm)
    text, family = found.form.config, FAMILIES[found.form.architecture]
    try:
        module = import_module(f"mlx_lm.models.{family.module}")
        arguments = getattr(module, "TextModelArgs", module.ModelArgs)
        stated = translated(text, (), lambda _: defaults_of(arguments))
        args = arguments.from_dict(stated | {"num_hidden_layers": 1} | _FORMS[family.number])
        model = (module.TextModel if hasattr(module, "TextModel") else module.Model)(args)
        network = MtpHead(model.model.layers[0], int(args.hidden_size), float(args.rms_norm_eps))
        layer = int(text["num_hidden_layers"])
        tensors = _named(model, _chosen(found.tensors(), family.number, layer), family.number)
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise found.wrong(f"its config.json or its tensors don't form one ({error!r})") from error
    found.fill(network, tensors)
    return network, text


def _chosen(stored: Tensors, form: str, layers: int) -> Tensors:
    """The first head's tensors: ours by our names, the decoder layer's as those of a model's layer 0."""
    chosen: Tensors = {}
    names, inner = _NAMES[form], "mtp.layers.0." if form == QWEN else f"layers.{layers}."
    for name, values in stored.items():
        name = name.removeprefix("language_model.").removeprefix("model.")
        if form == DEEPSEEK and name.removeprefix(inner) in names:
            name = name.removeprefix(inner)
        if name in names:
            chosen[names[name]] = values
        elif name.startswith(inner) and "embed_tokens" not in name and "shared_head" not in name:
            chosen[f"model.layers.0.{name.removeprefix(inner)}"] = values
    return chosen


def _named(model: Any, tensors: Tensors, form: str) -> Tensors:
    """In the form of mlx-lm's class: experts stacked, norms from 1."""
    own = {name: values for name, values in tensors.items() if not name.startswith("model.")}
    inner = {name: values for name, values in tensors.items() if name.startswith("model.")}
    if form == QWEN:
        # Weights of norms are stored minus 1.
        inner = _stacked(inner)
        own, inner = (
            {name: values + 1.0 if values.ndim == 1 and "norm" in name else values for name, values in each.items()}
            for each in (own, inner)
        )
    else:
        inner = model.sanitize(inner)
    return own | {f"layer.{name.removeprefix('model.layers.0.')}": values for name, values in inner.items()}


def _stacked(tensors: Tensors) -> Tensors:
    """Experts in one array a projection, from single ones (Qwen3-Next) or from gate and up side by side (Qwen3.5)."""
    prefix = "model.layers.0.mlp."
    stacked = {name: values for name, values in tensors.items() if ".experts." not in name}
    if f"{prefix}experts.gate_up_proj" in tensors:
        gate, up = mx.split(tensors[f"{prefix}experts.gate_up_proj"], 2, axis=-2)
        down = tensors[f"{prefix}experts.down_proj"]
        for name, values in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            stacked[f"{prefix}switch_mlp.{name}.weight"] = values
        return stacked
    for name in ("gate_proj", "up_proj", "down_proj"):
        count = sum(key.endswith(f".{name}.weight") and ".experts." in key for key in tensors)
        if count:
            experts = [tensors[f"{prefix}experts.{expert}.{name}.weight"] for expert in range(count)]
            stacked[f"{prefix}switch_mlp.{name}.weight"] = mx.stack(experts)
    return stacked
