"""How a service starts launch-pipeline, and with which environment."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from protocol.own_modules import module_command

_KEPT = ("PATH", "HF_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
"""A service manager passes on little: where programs, models and settings are must be the user's."""
_PREFIX = "LAUNCH_PIPELINE_"
_KEY_PART = "KEY"
"""Part of the names of variables that hold secrets, which are not passed on."""


def start_command(started: str = sys.argv[0]) -> tuple[str, ...]:
    """The installed command or the checkout's, by a path that stays valid if it is updated."""
    path = Path(started).absolute()
    if path.name == ".start.py":
        return (str(path.parent / "launch-pipeline"),)
    if path.name == "launch-pipeline" and os.access(path, os.X_OK):
        return (str(path),)
    return module_command("orchestrator.cli.entry")


def kept_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """What a service needs of `variables`, without keys: a definition is no place for them."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name in _KEPT or (name.startswith(_PREFIX) and _KEY_PART not in name.split("_"))
    }


def protected_folder(folders: tuple[str, ...], home: Path) -> str:
    """The one of `folders` that macOS opens to no LaunchAgent: below Desktop, Documents, Downloads or iCloud Drive."""
    closed = [home / name for name in ("Desktop", "Documents", "Downloads", "Library/Mobile Documents")]
    return next((each for each in folders if any(Path(each).is_relative_to(folder) for folder in closed)), "")
