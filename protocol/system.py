"""What this machine runs: the build of its operating system, packages, and how long it has slept."""

import importlib.metadata
import os
import subprocess
import sys
import time


def system_build() -> str:
    """Operating system and build."""
    if sys.platform == "darwin":
        out = subprocess.run(["/usr/bin/sw_vers", "-buildVersion"], capture_output=True, text=True)
        return f"macOS {out.stdout.strip()}"
    return f"{os.uname().sysname} {os.uname().release}"


def installed_version(package: str) -> str | None:
    """The version of an installed distribution, or None; does not import it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def seconds_asleep() -> float:
    """How long this machine has slept since it was started: by a clock that counts sleep, less one that does not
    (clock_gettime(3) of macOS and clock_gettime(2) of Linux)."""
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_MONOTONIC_RAW) - time.clock_gettime(time.CLOCK_UPTIME_RAW)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
