"""A tiny random model of every architecture of the installed mlx-lm, made from its own ModelArgs.

Most fields mean the same in every module, so `architecture_sizes` has a table by field name; its `RECIPES` have what is
particular to a module. A new release of mlx-lm brings new modules: the tests name those that can't be built.
"""

import dataclasses
import json
import shutil
from copy import deepcopy
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_flatten, tree_map_with_path

from tests.support.models.architecture_sizes import HEAD_SIZES, RECIPES, SIZES, TEXT_CLASSES, WIDTHS
from tests.support.models.tiny_models import ELEMENT
from tests.support.paths import DEMO_TARGET

IMPOSSIBLE = {
    "bitnet": "its linear layers exist only as a Metal kernel",
    "muse_spark": "the norm and rope of its queries and keys exist only as a Metal kernel",
}
"""Modules that no processor can run, with the reason."""

UNSTABLE = {
    "deepseek_v32": "its indexer's scores tie at 0, and which of them it takes depends on the slots",
    "glm_moe_dsa": "the same",
    "phi3small": "mlx-lm's prefill shows it later tokens, so chunks change its logits",
}
"""Models whose logits depend on more than the tokens."""
_DECAYS = ("A_log", "recurrent_param", "w_lora.lora.2.bias")
"""Parameters of recurrent layers whose initial values forget a token within a few steps: they are lowered."""

_REQUIRED: dict[Any, Any] = {bool: False, str: "", int: 1, float: 1.0}
"""Values of fields that are in no table and have no default."""


@cache
def modules() -> dict[str, Any]:
    """Every module of `mlx_lm.models` that defines a Model, by name, less those that need a package not installed."""
    found = {}
    for info in iter_modules(mlx_lm.models.__path__):
        try:
            module = import_module(f"{mlx_lm.models.__name__}.{info.name}")
        except (ModuleNotFoundError, SystemExit):  # `olmo` ends the process where its package is missing
            continue
        if hasattr(module, "Model"):
            found[info.name] = module
    return found


def configuration(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny model, for the caller to keep; `changes` replace fields of its text model."""
    recipe = {key: value for key, value in RECIPES.get(name, {}).items() if key != "text_config"}
    outer = {**_values(modules()[name].ModelArgs), "model_type": name, **recipe}
    if name not in TEXT_CLASSES:
        return deepcopy(outer | changes)
    owner, class_name = TEXT_CLASSES[name]
    text = _values(getattr(modules()[owner], class_name))
    for recipe in (RECIPES.get(owner, {}), RECIPES.get(name, {}).get("text_config", {})):
        text |= recipe.get("text_config", recipe)
    return deepcopy(outer | {"text_config": {"model_type": owner} | text | changes})


def tiny(name: str, seed: int = 0, **changes: Any) -> Any:
    """A random model. Raises what the module raises if the configuration does not fit it."""
    return _built(name, configuration(name, **changes), seed)


def tiny_with_wide_heads(name: str) -> Any:
    """The same with heads of 32, and of 32 only, which a quantization divides into groups."""
    config = configuration(name)
    for part in (config, config.get("text_config", {})):
        part.update({field: 32 for field in part if field in HEAD_SIZES and isinstance(part[field], int)})
        part.update(
            {field: 2 * part[field] for field in part if isinstance(part[field], int) and part[field] in WIDTHS}
        )
    return _built(name, config, 0)


def write_tiny(folder: Path, name: str, **config: Any) -> Path:
    """A tiny model in a new folder, with the demo target's tokenizer; `config` replaces fields of its config.json."""
    shutil.copytree(DEMO_TARGET, folder)
    # phi3small rules out tokens of a fixed number, and writes outside of the logits of a smaller vocabulary.
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    changes = {} if name == "phi3small" else {"vocab_size": vocabulary}
    weights = dict(tree_flatten(tiny(name, **changes).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(configuration(name, **changes) | config))
    return folder


def _built(name: str, config: dict[str, Any], seed: int) -> Any:
    module = modules()[name]
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.float32)
    model.update(tree_map_with_path(_varied, model.parameters()))
    model.set_dtype(ELEMENT)
    model.eval()
    mx.eval(model.parameters())
    return model


def _values(arguments: type) -> dict[str, Any]:
    """A value for each field that `SIZES` has or that has no default."""
    values = {}
    for field in dataclasses.fields(arguments):
        if field.name in SIZES:
            values[field.name] = SIZES[field.name]
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            values[field.name] = _REQUIRED.get(field.type)
    return values


def _varied(path: str, weights: mx.array) -> mx.array:
    """Weights of which none is zero, a norm's or a bias's neither, and which keep the scale of a hidden state."""
    if weights.dtype == mx.uint32:
        return mx.random.randint(0, 2**31 - 1, weights.shape).astype(mx.uint32)  # packed weights of a few bits each
    return weights + 0.1 * mx.random.normal(weights.shape) - 4.0 * path.endswith(_DECAYS)
