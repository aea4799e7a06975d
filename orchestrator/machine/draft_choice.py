"""Which engine drafts, on which folder: what was asked for, unless the Neural Engine was found not to do it."""

import sys
from pathlib import Path
from typing import NamedTuple

from orchestrator.machine.checkpoints import resolve
from orchestrator.machine.converted_draft import OnProgress, converted_draft, is_converted, source_of
from orchestrator.machine.hardware import chip, system_build
from protocol.contracts.engines import DraftEngineName
from protocol.contracts.neural_engine import EngineVerdict, ExaminedSystem, package_fingerprint, recorded


class DraftChoice(NamedTuple):
    """What the draft worker is told."""

    engine: DraftEngineName
    folder: Path
    note: str = ""
    """One line for the user, if it is not what he asked for."""


def draft_choice(engine: DraftEngineName, name: str | None, on_progress: OnProgress = lambda _: None) -> DraftChoice:
    """The engine and the folder of the draft `name` (None: the demo draft); converts it if need be.

    Raises InputError for a draft that can't be had.
    """
    if engine != "coreml":
        return DraftChoice(engine, resolve(name, "draft"))
    folder = converted_draft(name, on_progress)
    # Elsewhere the executor runs the package, and there is nothing to find out.
    verdict = recorded(place_of(folder)) if sys.platform == "darwin" else None
    return weigh(folder, name, verdict)


def weigh(folder: Path, name: str | None, verdict: EngineVerdict | None) -> DraftChoice:
    """Core ML on the converted `folder`, or the model that it was made from in MLX if the verdict says so."""
    if verdict is None or verdict.choice == "coreml":
        return DraftChoice("coreml", folder)
    given = name is None or not is_converted(Path(name).expanduser())
    source = resolve(name, "draft") if given else source_of(folder)
    note = f"The draft runs in MLX, not on the Neural Engine ({verdict.reason}): see launch-pipeline doctor."
    return DraftChoice("mlx", source, note)


def place_of(folder: Path) -> ExaminedSystem:
    """What a verdict on a converted model, found here and now, is about."""
    return ExaminedSystem(system_build(), chip(), package_fingerprint(folder))
