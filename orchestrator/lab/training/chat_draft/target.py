"""The option --target of the programs: a folder, by default that of the default target."""

import argparse
from pathlib import Path


def add_target(options: argparse.ArgumentParser, words: str) -> None:
    options.add_argument("--target", type=Path, help=f"{words}; the default target's without it")


def target_folder(given: Path | None) -> Path:
    """`given`, or the folder of the default target, which is fetched on first use."""
    if given is not None:
        return given
    # A folder needs none of the project's other packages.
    from orchestrator.machine.downloads.default_target import default_target, is_default_target

    folder, note = default_target()
    if not is_default_target(folder):
        raise SystemExit(note or "The default target is the demo target here: pass --target FOLDER.")
    return folder
