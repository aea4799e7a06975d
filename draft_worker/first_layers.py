"""Cuts a stock mlx-lm network to its first layers, before its weights are read. Knows no draft.

A trained exit brings a norm, and perhaps a decoder layer behind the kept ones (`protocol.contracts.drafters.early_exit`
names the tensors).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from protocol.contracts.drafters.early_exit import LAYER, NORM
from protocol.errors import InputError

_NORMS = ("norm", "final_layernorm", "ln_f", "norm_f")
_DEPTHS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
"""What `make_cache` of some architectures counts the layers by."""


class FirstLayers:
    """A `Division` that keeps the first `layers` layers. The tensors of the others are never read."""

    def __init__(self, layers: int, trained: Path) -> None:
        """`trained`: a folder with the tensors of a trained exit, if there are any."""
        self._layers = layers
        self._trained = trained

    def divide(self, network: Any) -> None:
        """Raises InputError for an architecture without such layers, and for a trained exit that does not fit."""
        body, name = _body(network, self._layers)
        tensors = _tensors(self._trained)
        own = {name.removeprefix(LAYER): tensor for name, tensor in tensors.items() if name.startswith(LAYER)}
        kept = body[name][: self._layers]
        if own:
            kept.append(_trained_layer(body[name][self._layers], own))
        setattr(body, name, kept)
        for module in [network, *network.modules()]:
            _count(getattr(module, "args", None), len(kept))
        if NORM in tensors:
            _load(_norm(body), {"weight": tensors[NORM]}, NORM)

    def await_loaded(self) -> None:
        """No other process loads a part of it."""


def _body(network: Any, layers: int) -> tuple[Any, str]:
    """The module that has the list of layers, and its attribute. There are more than `layers`."""
    every: list[Any] = getattr(network, "layers", [])
    if 0 < len(every) <= layers:
        raise InputError(f"The target has {len(every)} layers: choose an exit behind 1 to {len(every) - 1} of them.")
    for module in network.modules():
        for name, value in module.items():
            # Some models' own `layers` is a copy of the list, the part for one rank of a pipeline.
            if isinstance(value, list) and len(value) == len(every) > 0 and value[0] is every[0]:
                return module, name
    raise InputError("The target's architecture has no plain list of layers to leave early: choose another draft.")


def _count(arguments: Any, layers: int) -> None:
    for name in _DEPTHS:
        if isinstance(getattr(arguments, name, None), int):
            setattr(arguments, name, layers)


def _tensors(folder: Path) -> Mapping[str, mx.array]:
    found: dict[str, mx.array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        found.update(loaded)
    return found


def _trained_layer(layer: Any, tensors: Mapping[str, mx.array]) -> Any:
    """The target's next layer with other weights: its own are never read."""
    plain = dequantize_model(layer)
    _load(plain, tensors, f"{LAYER}*")
    return plain


def _norm(body: Any) -> nn.Module:
    found = next((body[name] for name in _NORMS if name in body), None)
    if found is None:
        raise InputError("The target's architecture has no final norm that a trained exit could replace.")
    return found


def _load(module: nn.Module, tensors: Mapping[str, mx.array], name: str) -> None:
    arrays: Any = dict(tree_flatten(module.parameters()))
    given = {name: tensor.astype(arrays[name].dtype) if name in arrays else tensor for name, tensor in tensors.items()}
    try:
        module.load_weights(list(given.items()))
    except ValueError as error:
        reason = str(error).splitlines()[0].rstrip(":. ")
        raise InputError(
            f"The trained exit's {name} does not fit the target's layers ({reason}): it was trained for another target."
        ) from error
