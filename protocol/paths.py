"""Where this program keeps what it can make again, and what it can't."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """A folder of this user's, by the system's own custom. It need not exist yet."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "launch-pipeline"
    return _by_custom("XDG_CACHE_HOME", ".cache")


def keys_folder() -> Path:
    """The same for this machine's keys, and for those of other machines that it knows."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "launch-pipeline" / "keys"
    return _by_custom("XDG_CONFIG_HOME", ".config") / "keys"


def config_file() -> Path:
    """Where this user's own settings are looked for, on macOS too: people write it by hand."""
    return _by_custom("XDG_CONFIG_HOME", ".config") / "config.toml"


def _by_custom(variable: str, default: str) -> Path:
    given = os.environ.get(variable, "")
    # The custom's own rule: a relative path there is to be ignored.
    home = Path(given) if given.startswith("/") else Path.home() / default
    return home / "launch-pipeline"
