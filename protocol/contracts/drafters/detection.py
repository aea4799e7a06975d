"""Finds out what kind of drafter a folder holds, from config.json and the tensors' names. Reads no tensor."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from protocol.contracts.drafters.block import block, is_block
from protocol.contracts.drafters.checkpoint import SPECULATORS, DrafterCheckpoint
from protocol.contracts.drafters.description import KINDS, Drafter
from protocol.contracts.drafters.eagle3 import eagle3
from protocol.contracts.drafters.mtp import has_mtp, mtp, stands_alone, states_mtp, unknown
from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError
from protocol.json_values import is_list


class _Reader(NamedTuple):
    read: Callable[[DrafterCheckpoint], Drafter]
    name: str
    """What its folders are said to hold, until they are read."""


_EAGLE3 = _Reader(eagle3, "an EAGLE-3 or P-EAGLE drafter")
_BLOCK = _Reader(block, "a DFlash, DSpark or DFlash2 drafter")
_MTP = _Reader(mtp, KINDS["mtp"].name)
_SPECULATORS = {
    **{"eagle3": _EAGLE3, "peagle": _EAGLE3, "mtp": _MTP},
    **dict.fromkeys(("dflash", "dspark", "dflash2"), _BLOCK),
}
"""By `speculators_model_type`."""
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
    if _stated(folder, config) is None and not states_mtp(config):
        return None
    return described(DrafterCheckpoint.read(folder, _MTP.name, config), with_own_head=with_own_head)


def described(found: DrafterCheckpoint, *, with_own_head: bool = False) -> Drafter | None:
    """As `read_drafter`, of a folder whose headers are read and which may have another config."""
    stated = _stated(found.folder, found.config)
    if stated is not None:
        return stated.read(found._replace(name=stated.name))
    own = states_mtp(found.config) and (with_own_head or (has_mtp(found) and stands_alone(found)))
    return mtp(found) if own else None


def has_own_head(folder: Path) -> bool:
    """Whether a language model's checkpoint has an MTP head that can be run.

    Raises InputError for a folder that can't be read.
    """
    config = ModelFolder(folder).config
    return (
        states_mtp(config)
        and not unknown(config)
        and has_mtp(DrafterCheckpoint.read(folder, KINDS["mtp"].name, config))
    )


def is_drafter(folder: Path) -> bool:
    """Whether the folder's config.json says that it is no language model by itself. Never raises."""
    try:
        config = ModelFolder(folder).config
        return _stated(folder, config) is not None or read_drafter(folder) is not None
    except InputError:
        return False


def _stated(folder: Path, config: Mapping[str, Any]) -> _Reader | None:
    """By what the config says of itself. Raises InputError for a kind that is not served."""
    architectures = _architectures(config)
    match config.get(SPECULATORS), config.get("model_type"):
        case str(kind), _:
            if kind not in _SPECULATORS:
                raise _foreign(folder, kind)
            return _SPECULATORS[kind]
        case _, str(kind) if kind.endswith(_SPLIT):
            raise InputError(
                f"{folder} holds an MTP head in mlx-vlm's own packaging ({kind[:60]}), which is not read: pass the "
                "original checkpoint of the target as the draft, which has the head too."
            )
        case _:
            pass
    for name in architectures:
        if "Eagle3" in name:
            return _EAGLE3
        if any(part in name for part in _FOREIGN):
            raise _foreign(folder, name)
    if is_block(config, architectures):
        return _BLOCK
    return _EAGLE3 if "draft_vocab_size" in config else None


def _architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("architectures")
    return tuple(name for name in names if isinstance(name, str)) if is_list(names) else ()


def _foreign(folder: Path, kind: str) -> InputError:
    return InputError(
        f"{folder} holds a drafter of the kind {kind[:60]}, which no draft engine runs: choose one of EAGLE-3, MTP, "
        "DSpark or DFlash, or a smaller model of the target's family."
    )
