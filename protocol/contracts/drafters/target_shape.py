"""The numbers of a target that its drafters must fit, from its config.json."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import InputError
from protocol.json_values import is_object

_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_VOCABULARIES = ("vocab_size", "padded_vocab_size")


class TargetShape(NamedTuple):
    layers: int
    width: int
    """Elements of the residual stream."""
    vocabulary: int


def target_shape(folder: Path) -> TargetShape:
    """The shape of the model in `folder`. Raises InputError if its config.json does not state it."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{folder}/config.json can't be read: pass the folder of a complete model.") from error
    shape = stated_shape(config)
    if shape is None:
        raise InputError(
            f"{folder}/config.json states no layers, width or vocabulary, so no drafter can be checked against it: "
            "choose another target, or an ordinary model as the draft."
        )
    return shape


def stated_shape(config: Any) -> TargetShape | None:
    """The shape that a config.json states, perhaps with the text model's part; None if it states none."""
    if not is_object(config):
        return None
    parts = [part for part in (config.get("text_config"), config) if is_object(part)]
    found = [_first(parts, names) for names in (_LAYERS, _WIDTHS, _VOCABULARIES)]
    known = [number for number in found if number is not None]
    return TargetShape(*known) if len(known) == len(found) else None


def _first(parts: Sequence[Mapping[str, Any]], names: tuple[str, ...]) -> int | None:
    values = (part.get(name) for part in parts for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)
