"""The folders and files of this program: cache, keys, configuration."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """This user's cache folder, by the system's convention. It need not exist yet."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "launch-pipeline"
    return _by_convention("XDG_CACHE_HOME", ".cache")


def keys_folder() -> Path:
    """The folder of this machine's keys and of the known keys of other machines. It need not exist yet."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "launch-pipeline" / "keys"
    return _by_convention("XDG_CONFIG_HOME", ".config") / "keys"


def config_file() -> Path:
    """The user's configuration file; on macOS too in ~/.config, since users write it by hand."""
    return _by_convention("XDG_CONFIG_HOME", ".config") / "config.toml"


def _by_convention(variable: str, default: str) -> Path:
    given = os.environ.get(variable, "")
    # The convention's rule: a relative path is ignored.
    home = Path(given) if given.startswith("/") else Path.home() / default
    return home / "launch-pipeline"
