"""A target's weights as training needs them: dequantised layers, its embedding and rows of its head.

`require_plain` refuses a target that computes anything else around its layers.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError
from protocol.inference.observed_modules import observing
from protocol.inference.stored_model import load_network, ready_for_processor


class Target:
    """A target of the Llama family (a stack of layers between an embedding and a norm), weights in float32."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.config = load_network(folder)
        ready_for_processor(self.model)
        stack = getattr(self.model, "model", None)
        if not all(hasattr(stack, name) for name in ("embed_tokens", "layers", "norm")):
            raise InputError(
                f"{folder} has no stack of layers between an embedding and a norm whose outputs could be recorded: "
                "choose a target of the Llama or Qwen family."
            )
        self.stack: Any = stack
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


_TOKENS = 8
_TOLERANCE = 0.1
"""Largest deviation, relative to the largest number: 8 bits and fp16 deviate by 0.01, a scale by far more."""


def require_plain(target: Target) -> None:
    """Raises InputError naming what differs: such a training would copy or imitate something else than the target."""
    first, norm = target.stack.layers[0], target.stack.norm
    calls: dict[int, mx.array] = {}

    def see(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> Any:
        calls[id(module)] = arguments[0]
        return result

    tokens = mx.arange(_TOKENS) * (target.vocabulary // _TOKENS)
    with observing([first, norm], see):
        logits = target.model(tokens[None], cache=make_prompt_cache(target.model))
    if not {id(first), id(norm)} <= {*calls}:
        raise _refused(target, "does not call its first layer or its final norm")
    entering, before = calls[id(first)], calls[id(norm)]
    # With a mean that is far from 0, by which a LayerNorm shows.
    shifted = before + mx.abs(before).max()
    if not _close(entering[0], target.embed(tokens)):
        raise _refused(target, "changes its embedding in front of the first layer (a scale, or positions)")
    if not _close(norm(shifted), mx.fast.rms_norm(shifted.astype(mx.float32), target.norm, target.norm_epsilon)):
        raise _refused(target, "has a final norm that is no RMSNorm with its stored weight")
    if not _close(logits, target.states(tokens).astype(mx.float32) @ target.head().T):
        raise _refused(target, "changes its logits behind the head (a scale, a cap or a bias)")


def _close(found: mx.array, expected: mx.array) -> bool:
    found = found.astype(mx.float32)
    if found.size != expected.size:
        return False
    deviation = mx.abs(found.reshape(expected.shape) - expected).max()
    return float(deviation) <= _TOLERANCE * float(mx.abs(expected).max())


def _refused(target: Target, what: str) -> InputError:
    return InputError(f"{target.folder} {what}, which training can't imitate: choose a target of the Llama family.")
