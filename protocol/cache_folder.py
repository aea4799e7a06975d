"""Where this program keeps what it can make again."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """A folder of this user's, by the system's own custom. It need not exist yet."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "launch-pipeline"
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The custom's own rule: a relative path there is to be ignored.
    home = Path(given) if given.startswith("/") else Path.home() / ".cache"
    return home / "launch-pipeline"
