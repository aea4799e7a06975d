"""A trained drafter as the draft: the folder that a name stands for, the engine that runs it, and whether it fits."""

import json
import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

from orchestrator.machine.cache_entries import made_once
from orchestrator.machine.checkpoints import resolve
from orchestrator.machine.drafts.converted_draft import is_converted
from orchestrator.machine.progress import OnProgress
from protocol.contracts.drafters.description import Drafter
from protocol.contracts.drafters.detection import has_own_head, read_drafter
from protocol.contracts.drafters.early_exit import MODEL_TYPE
from protocol.contracts.engines import AUTO, DraftEngineName, draft_model
from protocol.contracts.model_folder import ModelFolder, stated_shape
from protocol.errors import InputError
from protocol.paths import cache_folder

_EXIT = re.compile(r"exit(?::(\d{1,4}))?")
"""A folder of this name is passed as ./exit."""
_EXIT_ENGINE = "layerskip"
_EXIT_SHARE = 4
"""An exit lies behind one of so many layers, if no layer is named."""


class TrainedDraft(NamedTuple):
    engine: DraftEngineName
    folder: Path
    target: Path
    """Of the target, whose embedding, head or layers it uses."""
    drafter: Drafter


def trained_draft(
    engine: DraftEngineName, name: str | None, target: str | None, on_progress: OnProgress
) -> TrainedDraft | None:
    """The draft `name` beside `target`, if it is a trained drafter; None for an ordinary model.

    Raises InputError for a drafter that is damaged, that does not fit the target or the engine, and for an engine of
    drafters beside an ordinary model.
    """
    if is_exit(engine, name):
        name = name or MODEL_TYPE
    if name is None or is_converted(Path(name).expanduser()):
        return None
    if is_exit(engine, name):
        beside = _target_of(name, target, on_progress)
        folder = exit_folder(exit_layers(name, beside))
    else:
        folder = resolve(name, "draft", on_progress)
    drafter = _read(folder, engine, target, on_progress)
    if drafter is None:
        return None
    beside = _target_of(str(folder), target, on_progress)
    drafter.fitting(folder, beside)
    return TrainedDraft(drafter.engine, folder, beside, drafter)


def is_exit(engine: DraftEngineName, name: str | None) -> bool:
    """Whether the draft is an exit of the target that was not trained: it has no files of its own."""
    return engine == _EXIT_ENGINE if name is None else _EXIT.fullmatch(name) is not None


def exit_layers(name: str, target: Path) -> int:
    """The layers of the exit `name`, "exit" or "exit:E"; without E those that the target's files recommend, or a
    quarter of all."""
    match = _EXIT.fullmatch(name)
    assert match is not None
    if match[1] is not None:
        return int(match[1])
    return _recommended_exit(target) or max(1, ModelFolder(target).shape.layers // _EXIT_SHARE)


def exit_folder(layers: int) -> Path:
    """The folder of an exit that was not trained, in this user's cache."""
    place = cache_folder() / "exits" / f"exit-{layers}"
    return made_once(place, partial(_write_exit, layers))


def _write_exit(layers: int, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": MODEL_TYPE, "layers": layers}))


def _recommended_exit(target: Path) -> int | None:
    """transformers' generation_config.json names the layer of a target that was trained for early exit."""
    layers = ModelFolder(target).settings("generation_config.json").get("assistant_early_exit")
    return layers if type(layers) is int and layers > 0 else None


def _read(folder: Path, engine: DraftEngineName, target: str | None, on_progress: OnProgress) -> Drafter | None:
    drafter = read_drafter(folder, with_own_head=engine == "mtp")
    if drafter is None and engine == AUTO and target is not None:
        drafter = _own_head(folder, resolve(target, "target", on_progress))
    if drafter is None:
        if draft_model(engine) == "drafter":
            raise InputError(
                f"{folder} is an ordinary language model, which the draft engine {engine} can't run: leave out the "
                "engine, or choose a drafter that was trained for the target."
            )
        return None
    if engine not in (AUTO, drafter.engine):
        raise InputError(
            f"{folder} holds {drafter.name}, which the draft engine {engine} can't run: leave out the engine or choose "
            f"{drafter.engine}, or choose a draft in mlx-lm's format."
        )
    return drafter


def _own_head(folder: Path, target: Path) -> Drafter | None:
    """The MTP head of a checkpoint that has the target's shape. A smaller model of the family drafts as a model."""
    same = [stated_shape(ModelFolder(each).config) for each in (folder, target)]
    return read_drafter(folder, with_own_head=True) if same[0] == same[1] and has_own_head(folder) else None


def _target_of(draft: str, target: str | None, on_progress: OnProgress) -> Path:
    if target is None:
        raise InputError(
            f"The draft {draft} uses the embedding or layers of its target: name the target's folder or Hugging Face "
            "id too (--target), the same as on the other machine."
        )
    return resolve(target, "target", on_progress)
