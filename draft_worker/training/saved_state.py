"""What an unfinished training keeps in files that are replaced whole: its state, and the tokens of its head."""

from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from draft_worker.short_head import are_head_tokens
from draft_worker.training.optimisers import Optimisers
from draft_worker.training.rows import whole_file
from protocol.errors import InputError

_FILE = Path("training") / "state.safetensors"
"""In a folder of its own: readers of a drafter take every safetensors file beside its config."""
_WEIGHT, _OPTIMISER, _STATE = "weight.", "optimiser.", "state"


class Progressed(msgspec.Struct, kw_only=True):
    """How far a training is."""

    settings: str
    """What must be the same for the training to go on."""
    target: str
    """The target's fingerprint."""
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    epoch: int = 0
    position: int = 0
    """Rows of the epoch that are done."""
    shards: int = 0
    """Shards that the epoch reads; 0: it has not begun."""


def save(folder: Path, progressed: Progressed, network: nn.Module, optimisers: Optimisers) -> None:
    weights: Any = tree_flatten(network.trainable_parameters())
    state: Any = tree_flatten(optimisers.state)
    arrays = {_WEIGHT + name: array for name, array in weights} | {_OPTIMISER + name: array for name, array in state}
    path = folder / _FILE
    mx.eval(arrays)
    with whole_file(path) as unfinished:
        mx.save_safetensors(str(unfinished), arrays, {_STATE: msgspec.json.encode(progressed).decode()})


def require_same(folder: Path, settings: str, target: str) -> float:
    """Seconds that the training in `folder` has taken so far. Raises InputError if it is another one; `target`: the
    target's fingerprint."""
    path = folder / _FILE
    if not path.is_file():
        return 0.0
    progressed = _read(path)[1]
    _require_same(folder, progressed, settings, target)
    return progressed.seconds


def restore(folder: Path, settings: str, target: str, network: nn.Module, optimisers: Optimisers) -> Progressed:
    """A new training's progress if there is no file. Raises InputError for the state of another training."""
    path = folder / _FILE
    if not path.is_file():
        return Progressed(settings=settings, target=target)
    arrays, progressed = _read(path)
    _require_same(folder, progressed, settings, target)
    network.load_weights(_part(arrays, _WEIGHT), strict=False)
    optimisers.state = tree_unflatten(_part(arrays, _OPTIMISER))
    return progressed


def _require_same(folder: Path, progressed: Progressed, settings: str, target: str) -> None:
    if progressed.settings != settings:
        raise InputError(
            f"{folder} holds a training with other settings ({progressed.settings}; now {settings}): pass the same "
            "again, or another folder as --out."
        )
    if progressed.target != target:
        raise InputError(
            f"{folder} holds a training for another target: pass the same as --target again, or another folder as "
            "--out."
        )


def _read(path: Path) -> tuple[dict[str, mx.array], Progressed]:
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
        return loaded[0], msgspec.json.decode(loaded[1][_STATE], type=Progressed)
    except (RuntimeError, OSError, KeyError, msgspec.MsgspecError) as error:
        raise InputError(f"{path} is damaged ({error}): delete it, and the training begins again.") from error


def _part(arrays: dict[str, mx.array], prefix: str) -> list[tuple[str, mx.array]]:
    return [(name.removeprefix(prefix), array) for name, array in arrays.items() if name.startswith(prefix)]


_HEAD = Path("training") / "head_tokens.npy"


def kept_head_tokens(folder: Path, size: int, vocabulary: int) -> np.ndarray | None:
    """Those of a training that has begun; None: it has not. Raises InputError for tokens that are not its own."""
    path = folder / _HEAD
    if not path.is_file():
        return None
    try:
        found = np.load(path)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise _damaged(path, str(error)) from error
    integers = isinstance(found, np.ndarray) and np.issubdtype(found.dtype, np.integer)
    if not integers or not are_head_tokens(found, vocabulary):
        raise _damaged(path, f"no ascending tokens below {vocabulary}")
    wanted = min(size, vocabulary)
    if len(found) != wanted:
        raise InputError(
            f"{path} holds {len(found)} tokens instead of {wanted}: pass the same --head as before, or another folder "
            "as --out."
        )
    return found.astype(np.int64)


def head_tokens(folder: Path, size: int, counts: np.ndarray) -> np.ndarray:
    """(size,) ascending: those written most, `counts` (vocabulary,) times."""
    kept = kept_head_tokens(folder, size, len(counts))
    if kept is not None:
        return kept
    most = np.sort(np.argsort(-counts, kind="stable")[:size])
    with whole_file(folder / _HEAD) as path:
        np.save(path, most)
    return most


def _damaged(path: Path, what: str) -> InputError:
    return InputError(f"{path} is damaged ({what}): pass another folder as --out, where the training begins again.")
