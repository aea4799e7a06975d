"""Finds out what kind of drafter a folder holds, from config.json and the tensors' names. Reads no tensor."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocol.contracts.drafters.block import SPECULATORS, block, block_kind, is_block, options
from protocol.contracts.drafters.checkpoint import DrafterCheckpoint
from protocol.contracts.drafters.description import NAMES, Drafter, DrafterKind
from protocol.contracts.drafters.eagle3 import eagle3
from protocol.contracts.drafters.early_exit import MODEL_TYPE as EXIT
from protocol.contracts.drafters.early_exit import early_exit
from protocol.contracts.drafters.mtp import has_mtp, mtp, stands_alone, states_mtp, unknown
from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError
from protocol.json_values import is_list

_READERS: dict[DrafterKind, Callable[[DrafterCheckpoint], Drafter]] = {
    "eagle3": eagle3,
    "peagle": eagle3,
    "dspark": block,
    "dflash": block,
    "dflash2": block,
    "mtp": mtp,
    "exit": early_exit,
}
_SPECULATORS: dict[str, DrafterKind] = {
    **{"eagle3": "eagle3", "peagle": "peagle", "mtp": "mtp"},
    **{"dflash": "dflash", "dspark": "dspark", "dflash2": "dflash2"},
}
"""By `speculators_model_type`."""
_PREFIXED: tuple[DrafterKind, ...] = ("eagle3", "peagle", "dspark", "dflash", "dflash2")
"""Kinds whose tensors some programs name as parts of a `model`."""
_SPLIT = "_mtp"
"""How `model_type` ends in folders that mlx-vlm splits from a checkpoint (mlx_vlm/speculative/drafters/README.md)."""
_FOREIGN = ("PEagle", "ForCausalLMEagle", "EagleSpeculator", "Medusa", "Hydra", "MLPSpeculator", "Assistant")
"""Parts of the architectures' names of drafters that no engine runs."""


def read_drafter(folder: Path, *, with_own_head: bool = False) -> Drafter | None:
    """The trained drafter in `folder`; None for an ordinary language model.

    `with_own_head`: of a language model whose checkpoint has an MTP head, that head. Raises InputError for a folder
    that can't be read, for a drafter that is damaged, and for one of a kind that is not served.
    """
    config = ModelFolder(folder).config
    kind = _stated_kind(folder, config)
    if kind is not None:
        found = DrafterCheckpoint.read(folder, NAMES[kind], config)
        if kind in _PREFIXED:
            found = found.without_prefix("model.")
        return _READERS[kind](found)
    if not states_mtp(config):
        return None
    found = DrafterCheckpoint.read(folder, NAMES["mtp"], config)
    if with_own_head or (has_mtp(found) and stands_alone(found)):
        return mtp(found)
    return None


def has_own_head(folder: Path) -> bool:
    """Whether a language model's checkpoint has an MTP head that can be run.

    Raises InputError for a folder that can't be read.
    """
    config = ModelFolder(folder).config
    return states_mtp(config) and not unknown(config) and has_mtp(DrafterCheckpoint.read(folder, NAMES["mtp"], config))


def is_drafter(folder: Path) -> bool:
    """Whether the folder's config.json says that it is no language model by itself. Never raises."""
    try:
        config = ModelFolder(folder).config
        return _stated_kind(folder, config) is not None or read_drafter(folder) is not None
    except InputError:
        return False


def _stated_kind(folder: Path, config: dict[str, Any]) -> DrafterKind | None:
    """By what the config says of itself. Raises InputError for a kind that is not served."""
    architectures = _architectures(config)
    match config.get(SPECULATORS), config.get("model_type"):
        case str(kind), _:
            if kind not in _SPECULATORS:
                raise _foreign(folder, kind)
            return _SPECULATORS[kind]
        case _, str(kind) if kind == EXIT:
            return "exit"
        case _, str(kind) if kind.endswith(_SPLIT):
            raise InputError(
                f"{folder} holds an MTP head in mlx-vlm's own packaging ({kind[:60]}), which is not read: pass the "
                "original checkpoint of the target as the draft, which has the head too."
            )
        case _:
            pass
    for name in architectures:
        if "Eagle3" in name:
            return "eagle3"
        if any(part in name for part in _FOREIGN):
            raise _foreign(folder, name)
    if is_block(config, architectures):
        return block_kind(options(config))
    return "eagle3" if "draft_vocab_size" in config else None


def _architectures(config: dict[str, Any]) -> tuple[str, ...]:
    names = config.get("architectures")
    return tuple(name for name in names if isinstance(name, str)) if is_list(names) else ()


def _foreign(folder: Path, kind: str) -> InputError:
    return InputError(
        f"{folder} holds a drafter of the kind {kind[:60]}, which no draft engine runs: choose one of EAGLE-3, MTP, "
        "DSpark or DFlash, or a smaller model of the target's family."
    )
