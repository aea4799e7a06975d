"""The folders, files and variables of this program: cache, keys, configuration."""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

SHARED_MEMORY = Path("/dev") / "shm"
"""Where Linux shows shared memory as files; macOS shows it nowhere."""
SEGMENTS_VARIABLE = "LAUNCH_PIPELINE_SEGMENTS"
"""Another folder for the list of shared memory; the tests set it."""

SESSIONS_VARIABLE = "LAUNCH_PIPELINE_SESSIONS"
"""Another folder for the sessions of pipelines; the tests set it. Its path must be short: it becomes a socket's."""

MAX_SOCKET_PATH = 100
"""Bytes that no socket path reaches; macOS truncates them at 104."""
_LONGEST_SOCKET = "lp-9999999-12345678/workers"
"""Below the folder of sessions."""
_DARWIN_USER_DIR = 65536
"""The number of a folder of this user in macOS's confstr(3): short, kept, and without a name in Python."""

PREFIXES_VARIABLE = "LAUNCH_PIPELINE_PREFIXES"
"""Another folder for the disk cache; the tests set it."""

SERVERS_VARIABLE = "LAUNCH_PIPELINE_SERVERS"
"""Another folder for the list of HTTP servers; `launch` sets it for its own, and the tests do."""

NARROW_VARIABLE = "LAUNCH_PIPELINE_NARROW_MEMORY"
"""Bytes that a worker may use for copies of its weights in 16 bits (`protocol.inference.narrow_weights`)."""

UNPACKED_VARIABLE = "LAUNCH_PIPELINE_UNPACKED_MEMORY"
"""Bytes that a worker's unpacked weights may take on a processor (`protocol.inference.stored_model`)."""


def cache_folder() -> Path:
    """This user's cache folder, by the system's convention. It need not exist yet."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "launch-pipeline"
    return _by_convention("XDG_CACHE_HOME", ".cache")


def record_file(folder: str, key: Any) -> Path:
    """The file with what is known of `key`, in a folder of the cache. Of another key it is another file."""
    return cache_folder() / folder / f"{hashlib.sha256(msgspec.json.encode(key)).hexdigest()}.json"


def keys_folder() -> Path:
    """The folder of this machine's keys and of the known keys of other machines. It need not exist yet."""
    if sys.platform == "darwin":
        return _application_support() / "keys"
    return _by_convention("XDG_CONFIG_HOME", ".config") / "keys"


def sessions_folder() -> Path:
    """The folder of this user's sessions, whose path is short enough for sockets. It need not exist yet.

    On macOS not in /tmp, where files go that nobody used for three days (`daily_clean_tmps_days`, periodic.conf(5)).
    """
    if given := os.environ.get(SESSIONS_VARIABLE):
        return Path(given)
    if sys.platform != "darwin":
        return Path("/tmp") / f"launch-pipeline-{os.getuid()}"  # noqa: S108 - used privately
    folder = _application_support() / "sessions"
    if len(os.fsencode(folder / _LONGEST_SOCKET)) < MAX_SOCKET_PATH:
        return folder
    return Path(os.confstr(_DARWIN_USER_DIR) or "/tmp") / "launch-pipeline"  # noqa: S108 - used privately


def segments_folder() -> Path:
    """The folder that lists this user's shared memory. It need not exist yet.

    Not in a temporary folder: macOS removes what nobody used there for three days (confstr(3), and dirhelper.c in
    Apple's system_cmds), systemd after ten (tmpfiles.d(5)). Where shared memory is a folder, the list is beside it,
    and both last until the machine restarts.
    """
    given = os.environ.get(SEGMENTS_VARIABLE)
    if given:
        return Path(given)
    if SHARED_MEMORY.is_dir():
        return SHARED_MEMORY / f"launch-pipeline-{os.getuid()}-segments"
    return _application_support() / "segments"


def servers_folder() -> Path:
    """The folder that lists this user's HTTP servers. It need not exist yet."""
    given = os.environ.get(SERVERS_VARIABLE)
    return Path(given) if given else cache_folder() / "servers"


def config_file() -> Path:
    """The user's configuration file; on macOS too in ~/.config, since users write it by hand."""
    return _by_convention("XDG_CONFIG_HOME", ".config") / "config.toml"


def _application_support() -> Path:
    return Path.home() / "Library" / "Application Support" / "launch-pipeline"


def _by_convention(variable: str, default: str) -> Path:
    given = os.environ.get(variable, "")
    # The convention's rule: a relative path is ignored.
    home = Path(given) if given.startswith("/") else Path.home() / default
    return home / "launch-pipeline"
