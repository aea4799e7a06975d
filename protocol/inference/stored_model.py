"""Reads an mlx-lm model from its folder. Every process that needs a model's network gets it here."""

import inspect
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from textwrap import shorten
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm import utils

from protocol.contracts.model_config import stated_bases, translated
from protocol.contracts.model_folder import PROCESSOR_BYTES, ModelFolder
from protocol.errors import InputError
from protocol.inference.device import compute, spare_compiler
from protocol.inference.observed_modules import modules_of
from protocol.inference.packed_weights import (
    ScaledLinear,
    Weights,
    dequantized,
    examine,
    in_mlx_form,
    join_experts,
    unpack_latents,
)
from protocol.paths import UNPACKED_VARIABLE

_MOST_STREAMS = 8
_parameters: Callable[[Any], int] = vars(utils)["get_total_parameters"]
_load_model: Callable[..., tuple[nn.Module, dict[str, Any]]] = vars(utils)["load_model"]
_classes_of: Callable[[dict[str, Any]], tuple[Any, Any]] = vars(utils)["_get_classes"]


def load_network(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The network in `folder`, its weights not yet read, and the content of config.json in the form of mlx-lm.

    Code in the folder is never run. Raises InputError for files that are not whole, for a config.json or packed weights
    that mlx-lm would misread, and for what it refuses.
    """

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        model, arguments = _classes_of(config)
        config.update(translated(config, tensors, _defaults))
        text: Any = config.get("text_config") or {}
        stated: Any = config.get("quantization_config") or text.get("quantization_config") or {}
        # mlx-lm knows these forms of whole checkpoints by their names.
        if stated.get("quant_method") in ("awq", "bitnet", "gptq"):
            return model, arguments
        own: Any = config.get("quantization") or {}
        common = {name: each for name, each in own.items() if not isinstance(each, bool | dict)}
        # Entries for single layers may have the names of another class. Without one mlx-lm derives the form of each
        # layer from its tensors, and uses neither of these numbers.
        config["quantization"] = {"group_size": 64, "bits": 4} | common
        return _reading(model), arguments

    with loading(folder):
        tensors = ModelFolder(folder).examined_tensors()
        try:
            network, config = _load_model(folder, lazy=True, get_model_classes=classes, trust_remote_code=False)
        except InputError as error:
            raise InputError(f"The model in {folder} can't be used. {error}") from error
    _validate_bases(folder, network, config)
    return network, config


def stock_network(folder: Path) -> Any:
    """mlx-lm's own network with its weights, in the types of our workers: for mlx-lm's own loop. A `LanguageModel`
    wraps and stages what it is given. Raises InputError as `load_network` does."""
    network, _ = load_network(folder)
    ready_for_processor(network)
    compute(network.parameters())
    return network


def _reading(model: Any) -> Any:
    """The class of an architecture that reads weights in any publisher's form, and is mlx-lm's own from then on."""

    def sanitize(self: Any, weights: Weights) -> Weights:
        stored = in_mlx_form(weights)
        unpack_latents(self, stored)
        made = join_experts(self, model.sanitize(self, dict(stored)) if hasattr(model, "sanitize") else stored)
        examine(self, stored, made)
        self.__class__ = model
        return made

    return type(model.__name__, (model,), {"sanitize": sanitize, "__module__": model.__module__})


@contextmanager
def loading(folder: Path) -> Generator[None]:
    """Inside, what mlx-lm and MLX raise about the model in `folder` becomes an InputError."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(
            f"{folder} holds no model ({error}): name a folder with config.json and model*.safetensors."
        ) from error
    except AssertionError as error:
        # mlx-lm's models assert what must hold of the sizes in their configuration.
        raise InputError(
            f"mlx-lm refuses the sizes that the config.json in {folder} states, a vocab_size of 0 for example: "
            "download the model again, or correct the file."
        ) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise InputError(
            f"The model in {folder} can't be loaded ({reason_of(error)}): "
            "download it again, or choose an architecture that mlx-lm supports."
        ) from error


def reason_of(error: Exception) -> str:
    """The beginning of an error, short enough for a sentence."""
    return shorten(str(error), 200, placeholder=" …").rstrip(".") or type(error).__name__


def ready_for_processor(network: Any) -> None:
    """Unpack the weights to float32 where this process computes on a processor, which has fast kernels for it alone:
    quantised products are many times slower. They stay packed where that would take more memory than this worker is
    allowed (`UNPACKED_VARIABLE`), but for experts with scales of their own, which MLX heeds on a GPU alone."""
    if mx.default_device() == mx.Device(mx.cpu):
        allowed = os.environ.get(UNPACKED_VARIABLE)
        scaled = any("global_scale" in one and not isinstance(one, ScaledLinear) for one in network.modules())
        if scaled or allowed is None or PROCESSOR_BYTES * _parameters(network) <= int(allowed):
            # MLX unpacks on one thread a stream.
            streams = cycle([mx.new_stream(mx.cpu) for _ in range(min(os.cpu_count() or 1, _MOST_STREAMS))])
            for part in (*getattr(network, "layers", ()), network):
                with mx.stream(next(streams)):
                    dequantized(part).set_dtype(mx.float32)
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
