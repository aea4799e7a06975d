"""Which tokens a drafter guesses, chosen once for a training."""

import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from draft_worker.training.whole_file import whole
from protocol.errors import InputError

_FILE = Path("training") / "tokens.npz"


class TokenChoice(NamedTuple):
    """Counted in the target's answers when a training begins; further answers would change it."""

    head: np.ndarray
    """(head,) ascending int64: the tokens that the target wrote most often."""
    unused: int
    """A token that the target never wrote, if there is one."""


def token_choice(out: Path, counts: np.ndarray, head: int) -> TokenChoice:
    """That of the training in `out`, or a new one of at most `head` tokens. `counts` (vocabulary,): of the answers.

    Raises InputError for a damaged file.
    """
    path = out / _FILE
    if path.is_file():
        return _read(path, min(head, len(counts)), len(counts))
    most = np.sort(np.argsort(-counts, kind="stable")[:head])
    chosen = TokenChoice(most, int(np.flatnonzero(counts == counts.min())[-1]))
    with whole(path) as unfinished:
        np.savez(unfinished, **chosen._asdict())
    return chosen


def _read(path: Path, size: int, vocabulary: int) -> TokenChoice:
    try:
        with np.load(path) as file:
            head, unused = file["head"].astype(np.int64), int(file["unused"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is damaged ({error}): pass another folder as --out.") from error
    ascending = head.shape == (size,) and bool((np.diff(head) > 0).all())
    if not ascending or not (head[0] >= 0 and head[-1] < vocabulary and 0 <= unused < vocabulary):
        raise InputError(f"{path} is not of this --head and target: pass another folder as --out.")
    return TokenChoice(head, unused)
