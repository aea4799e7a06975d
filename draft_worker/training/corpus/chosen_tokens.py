"""Tokens that a training chooses once, by how often the target wrote them, and keeps while more answers appear."""

from pathlib import Path
from zipfile import BadZipFile

import msgspec
import numpy as np

from draft_worker.head_tokens import are_head_tokens
from draft_worker.training.whole_file import whole_file
from protocol.errors import InputError

_HEAD, _MASK = Path("training") / "head_tokens.npy", Path("training") / "mask_token.json"


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


def mask_token(folder: Path, counts: np.ndarray) -> int:
    """The last one of those written least: what a masked place of a block reads."""
    path = folder / _MASK
    if path.is_file():
        return _read_mask(path, len(counts))
    chosen = int(np.flatnonzero(counts == counts.min())[-1])
    with whole_file(path) as unfinished:
        unfinished.write_bytes(msgspec.json.encode(chosen))
    return chosen


def _read_mask(path: Path, vocabulary: int) -> int:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=int)
    except (OSError, msgspec.MsgspecError) as error:
        raise _damaged(path, str(error)) from error
    if not 0 <= found < vocabulary:
        raise _damaged(path, f"no token of {vocabulary}")
    return found


def _damaged(path: Path, what: str) -> InputError:
    return InputError(f"{path} is damaged ({what}): pass another folder as --out, where the training begins again.")
