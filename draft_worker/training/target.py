"""A target's weights as training needs them: dequantised layers, its embedding and rows of its head."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError
from protocol.inference.stored_model import load_network, ready_for_processor

_NETWORKS = ("llama", "qwen2", "qwen3")
"""mlx-lm's that compute nothing around their layers but an embedding, an RMSNorm and a head: others scale, shift or cap
there, and training would imitate something else than the target. llama serves Mistral too."""


class Target:
    """A stack of layers between an embedding and a norm, weights in float32."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError for a network of another kind."""
        self.folder = folder
        self.model, self.config = load_network(folder)
        ready_for_processor(self.model)
        network = type(self.model).__module__.rpartition(".")[2]
        if network not in _NETWORKS:
            raise InputError(
                f"{folder} has the network {network}, and training knows {', '.join(_NETWORKS)}: choose a target of "
                "the Llama or Qwen family."
            )
        self.stack: Any = self.model.model
        self.layers: int = len(self.stack.layers)
        own = getattr(self.model, "lm_head", None)
        self.tied = own is None
        """The embedding is the head too."""
        self._head: nn.Module = self.stack.embed_tokens if own is None else own

    @property
    def fingerprint(self) -> str:
        """Of its weights."""
        return ModelFolder(self.folder).fingerprint

    @property
    def width(self) -> int:
        return self.norm.shape[0]

    @property
    def norm(self) -> mx.array:
        """(width,) weight of the final norm."""
        return self.stack.norm.weight.astype(mx.float32)

    @property
    def norm_epsilon(self) -> float:
        return self.config.get("rms_norm_eps", 1e-6)

    @property
    def vocabulary(self) -> int:
        return self.stack.embed_tokens.weight.shape[0]

    def embed(self, tokens: mx.array) -> mx.array:
        return self.stack.embed_tokens(tokens).astype(mx.float32)

    def states(self, tokens: mx.array) -> mx.array:
        """(tokens, width): of one text, behind the final norm."""
        return self.stack(tokens[None], cache=make_prompt_cache(self.model))[0]

    def head(self, tokens: mx.array | None = None) -> mx.array:
        """(tokens, width) rows of the head: of these tokens, or of all."""
        return rows(self._head, tokens)

    def layer(self, number: int) -> dict[str, mx.array]:
        """Weights of a layer by name, as in a published Llama checkpoint behind `layers.N.`."""
        found = {}
        for name, module in self.stack.layers[number].named_modules():
            if "weight" in module:
                found[f"{name}.weight"] = rows(module)
            if "bias" in module:
                found[f"{name}.bias"] = module["bias"].astype(mx.float32)
        return found


def rows(module: Any, chosen: mx.array | None = None) -> mx.array:
    """The weight of a linear layer, embedding or norm in float32, dequantised: of the chosen rows, or of all."""
    parts = [module[name] for name in ("weight", "scales", "biases") if name in module]
    if chosen is not None:
        parts = [part[chosen] for part in parts]
    if len(parts) == 1:
        return parts[0].astype(mx.float32)
    mode = getattr(module, "mode", "affine")
    return mx.dequantize(*parts, group_size=module.group_size, bits=module.bits, mode=mode).astype(mx.float32)


def trained(network: nn.Module) -> int:
    """Parameters that training changes."""
    flat: Any = tree_flatten(network.trainable_parameters())
    return sum(array.size for _, array in flat)
