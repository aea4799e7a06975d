"""Which build of MLX's Metal kernels is installed, and for which macOS it was made. Imports no MLX."""

import importlib.metadata
import os
import re
import subprocess
from collections.abc import Iterable

_SW_VERS = "/usr/bin/sw_vers"


def metal_wheel_target() -> int | None:
    """The major version of macOS that the installed wheel of mlx-metal was built for; None without such a wheel.

    A wheel's tags are in its WHEEL file: https://packaging.python.org/specifications/binary-distribution-format.
    """
    try:
        text = importlib.metadata.distribution("mlx-metal").read_text("WHEEL") or ""
    except importlib.metadata.PackageNotFoundError:
        return None
    return newest_target(line.removeprefix("Tag:").strip() for line in text.splitlines() if line.startswith("Tag:"))


def newest_target(tags: Iterable[str]) -> int | None:
    """The highest macOS among wheel tags such as py3-none-macosx_26_0_arm64."""
    versions = [int(found[1]) for tag in tags if (found := re.search(r"-macosx_(\d+)_\d+_", tag))]
    return max(versions, default=None)


def macos_version(program: str = _SW_VERS) -> str:
    """The version of macOS, such as 26.1; empty if it can't be asked for.

    Python itself may be told an older one (CPython issue 135675), and so would `sw_vers` with SYSTEM_VERSION_COMPAT=1.
    """
    environment = {**os.environ, "SYSTEM_VERSION_COMPAT": "0"}
    try:
        out = subprocess.run([program, "-productVersion"], capture_output=True, text=True, env=environment, check=False)
    except OSError:
        return ""
    return out.stdout.strip()
