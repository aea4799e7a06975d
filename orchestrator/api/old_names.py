"""Names of options until version 0.1, which work for one release more with a warning. Delete this file after that."""

import warnings
from collections.abc import Mapping
from typing import Any

from orchestrator.api.caller import caller_level
from protocol.errors import InputError

OLD_NAMES = {"kv_memory": "arena_memory", "kept_memory": "prefix_cache_memory"}
"""Keywords, configuration keys, and with hyphens the flags, each with the name that replaces it."""


def renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options under their present names, with a DeprecationWarning for each old one.

    Raises InputError if an option is given under both names.
    """
    found = dict(options)
    for old, new in OLD_NAMES.items():
        if old not in found:
            continue
        if new in found:
            raise InputError(f"{old} is the old name of {new}: give only {new}.")
        sentence = f"{old} is now {new}; the old name goes with the next release."
        warnings.warn(sentence, DeprecationWarning, caller_level())
        found[new] = found.pop(old)
    return found
