"""Virtual environments of this user's cache with pinned packages. Does not know what the packages are for."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

from orchestrator.machine.cache_entries import made_in_place
from orchestrator.machine.downloads.package_index import Unavailable, has_pip, preferred_uv, run_installer
from protocol.paths import cache_folder

PYTHON = "bin/python"
"""The interpreter, relative to the environment."""


def environment(name: str, pins: Mapping[str, str], on_bytes: Callable[[int], None]) -> Path:
    """The Python of an environment with these versions of packages and their dependencies; installed on first use.

    `on_bytes` gets how much has been installed, from time to time. Raises Unavailable if the packages can't be
    installed, InputError if the cache can't be written.
    """
    place = environment_folder(name, pins)
    return made_in_place(place, lambda folder: _fill(folder, pins, on_bytes), PYTHON) / PYTHON


def environment_folder(name: str, pins: Mapping[str, str]) -> Path:
    """Where the environment is or will be: other versions, or another Python, have a folder of their own."""
    key = "\n".join([sys.version, sys.base_prefix, *_requirements(pins)])
    return cache_folder() / "environments" / f"{name}-{sha256(key.encode()).hexdigest()[:12]}"


def _fill(folder: Path, pins: Mapping[str, str], on_bytes: Callable[[int], None]) -> None:
    uv, pip = preferred_uv(), has_pip()
    # Debian's Python can make an environment without pip only, unless python3-venv is installed.
    _make([sys.executable, "-m", "venv", *(["--without-pip"] if uv or pip else []), str(folder)])
    python = str(folder / PYTHON)
    if uv is not None:
        command = [uv, "pip", "install", "--no-cache", "--python", python]
    elif pip:
        command = [sys.executable, "-m", "pip", "--python", python, "install", "--no-cache-dir"]
    else:
        command = [python, "-m", "pip", "install", "--no-cache-dir"]
    run_installer([*command, *_requirements(pins)], folder, on_bytes)
    shutil.rmtree(folder / "temporary")


def _make(command: list[str]) -> None:
    made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if made.returncode:
        lines = (made.stdout + made.stderr).strip().splitlines() or ["no words"]
        raise Unavailable(f"Python can't make a virtual environment: {lines[-1][:200]}")


def _requirements(pins: Mapping[str, str]) -> list[str]:
    return [f"{package}=={version}" for package, version in sorted(pins.items())]
