"""Where the profile of the user's own machine is kept. Knows nothing of its content."""

from pathlib import Path

from protocol.paths import cache_folder


def calibration_file() -> Path:
    """`launch-pipeline calibrate` writes it, `--this-mac` reads it."""
    return cache_folder() / "this-machine.toml"
