"""Reads an mlx-lm model from its folder. Every process that needs a model's network gets it here."""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm import utils

from protocol.contracts.model_config import stated_bases, translated
from protocol.contracts.model_folder import PROCESSOR_BYTES, ModelFolder
from protocol.errors import InputError
from protocol.inference.device import spare_compiler
from protocol.inference.observed_modules import modules_of
from protocol.paths import UNPACKED_VARIABLE

_parameters: Callable[[Any], int] = vars(utils)["get_total_parameters"]
_load_model: Callable[..., tuple[nn.Module, dict[str, Any]]] = vars(utils)["load_model"]
_classes_of: Callable[[dict[str, Any]], tuple[Any, Any]] = vars(utils)["_get_classes"]


def load_network(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The network in `folder`, its weights not yet read, and the content of config.json in the form of mlx-lm.

    Code in the folder is never run. Raises InputError for weight files that are not whole, and for a config.json that
    mlx-lm would misread; beside that, what mlx-lm raises.
    """
    tensors = ModelFolder(folder).examined_tensors()

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        found = _classes_of(config)
        try:
            config.update(translated(config, tensors, _defaults))
        except InputError as error:
            raise InputError(f"The model in {folder} can't be used. {error}") from error
        return found

    network, config = _load_model(folder, lazy=True, get_model_classes=classes, trust_remote_code=False)
    _validate_bases(folder, network, config)
    return network, config


def ready_for_processor(network: Any) -> None:
    """Unpack the weights to float32 where this process computes on a processor, which has fast kernels for it alone:
    quantised products are many times slower. They stay packed where that would take more memory than this worker is
    allowed (`UNPACKED_VARIABLE`)."""
    if mx.default_device() == mx.Device(mx.cpu):
        allowed = os.environ.get(UNPACKED_VARIABLE)
        if allowed is None or PROCESSOR_BYTES * _parameters(network) <= int(allowed):
            utils.dequantize_model(network)
        network.set_dtype(mx.float32)
        spare_compiler()


def _defaults(config: Mapping[str, Any]) -> Mapping[str, object]:
    """The fields that mlx-lm's architecture reads, with their defaults; none for an architecture that it lacks."""
    try:
        _, arguments = _classes_of(dict(config))
    except (ValueError, KeyError, TypeError):
        return {}
    return defaults_of(arguments)


def defaults_of(arguments: Any) -> Mapping[str, object]:
    """The fields of an architecture's `ModelArgs`, with their defaults."""
    return {name: each.default for name, each in inspect.signature(arguments).parameters.items()}


def _validate_bases(folder: Path, network: nn.Module, config: dict[str, Any]) -> None:
    """No logits would show a wrong base."""
    stated = stated_bases(config)
    used = {float(module.base) for module in modules_of(network) if isinstance(module, nn.RoPE)}
    if stated and used and used.isdisjoint(stated):
        raise InputError(
            f"The config.json in {folder} states a rotary base of {min(stated):,.0f}, and mlx-lm's code for this "
            f"architecture computes with {min(used):,.0f}: choose another model."
        )
