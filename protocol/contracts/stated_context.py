"""The context that a model's configuration states. Pure."""

from collections.abc import Mapping
from typing import Any

from protocol.json_values import is_object

_NAMES = ("max_position_embeddings", "n_positions", "model_max_length", "max_seq_len", "block_size")


def stated_positions(config: Mapping[str, Any]) -> int | None:
    """The most positions, by any of the names in use; None if none is stated.

    mlx-lm's own arguments leave this out for some architectures, and it may stand with the text model's part.
    """
    parts = [config, _fields(config.get("text_config"))]
    found = [part[name] for part in parts for name in _NAMES if isinstance(part.get(name), int)]
    return min((number for number in found if number > 1), default=None)


def _fields(part: object) -> Mapping[str, Any]:
    if is_object(part):
        return part
    return vars(part) if hasattr(part, "__dict__") else {}
