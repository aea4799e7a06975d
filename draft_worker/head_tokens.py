"""Reads which tokens a draft's head has. Knows no engine and no MLX.

A draft reads its head at every growth step, and most of the vocabulary is almost never the target's next token.
"""

from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from protocol.contracts.model_folder import HEAD_TOKENS, stored_head_tokens
from protocol.errors import InputError

HeadTokens: TypeAlias = npt.NDArray[np.int32]
"""Ascending tokens below the vocabulary."""


def read_head_tokens(folder: Path, vocabulary: int) -> HeadTokens | None:
    """The tokens of the head of the model in `folder`; None without the file: the head has the whole vocabulary.

    Raises InputError if the file does not fit the model.
    """
    try:
        tokens = stored_head_tokens(folder)
    except ValueError as error:
        raise InputError(f"{error}: convert or train the draft again.") from error
    if tokens is None:
        return None
    if tokens.dtype != np.int32 or not are_head_tokens(tokens, vocabulary):
        raise InputError(
            f"{folder / HEAD_TOKENS} must hold ascending int32 tokens below {vocabulary}: train the draft again."
        )
    return np.array(tokens)


def are_head_tokens(tokens: npt.NDArray[np.integer], vocabulary: int) -> bool:
    """Whether these are ascending tokens below `vocabulary`, at least one."""
    ascending = tokens.ndim == 1 and bool((np.diff(tokens) > 0).all())
    return ascending and len(tokens) > 0 and tokens[0] >= 0 and tokens[-1] < vocabulary
