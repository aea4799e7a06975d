"""What a drafter asks of its target's config.json. Knows no weights."""

import json
from pathlib import Path
from typing import NamedTuple

from protocol.errors import InputError


class TargetSizes(NamedTuple):
    """0: not stated."""

    layers: int
    width: int


def target_sizes(folder: Path) -> TargetSizes:
    """Raises InputError if the file can't be read."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        text = config.get("text_config") or config
        return TargetSizes(*(int(text.get(name) or 0) for name in ("num_hidden_layers", "hidden_size")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"The config.json of the target in {folder} can't be read ({error}): download the target again."
        ) from error
