"""A head that computes the logits of some tokens of the vocabulary only, and the file that names them.

A draft reads its head at every growth step, and most of the vocabulary is almost never the target's next token.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from protocol.contracts.model_folder import HEAD_TOKENS, stored_head_tokens
from protocol.errors import InputError
from protocol.inference.narrow_weights import keep_narrow

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


def shorten_head(network: Any, tokens: HeadTokens) -> "ShortHead":
    """Let the mlx-lm model compute logits of these tokens alone: column c is token `tokens[c]`."""
    tied = network.args.tie_word_embeddings
    head = ShortHead(network.model.embed_tokens if tied else network.lm_head, tokens, tied=tied)
    network.lm_head = head
    network.args.tie_word_embeddings = False
    return head


def keep_rows(module: nn.Module, tokens: HeadTokens) -> None:
    """Keep these tokens' rows of an embedding or a linear layer, quantised or not."""
    chosen = mx.array(tokens)
    # Every parameter of such a layer has a row a token.
    module.update({name: values[chosen] for name, values in module.parameters().items()})


class ShortHead(nn.Module):
    """Logits (..., len(tokens)). `head` is an embedding or a linear layer, quantised or not.

    A `tied` head's embedding stays in memory, so it can compute any other token's logits too: see `widen`.
    """

    def __init__(self, head: nn.Module, tokens: HeadTokens, *, tied: bool) -> None:
        super().__init__()
        rows: Any = copy.copy(head)
        keep_rows(rows, tokens)
        # Not in `keep_rows`: a growth step widens the head, and waits for its candidates alone.
        mx.eval(rows.parameters())
        keep_narrow(rows)
        self.parts = [rows]
        """Their logits follow one another."""
        self._embedding = head if tied else None
        self._more: tuple[int, ...] = ()

    @property
    def widens(self) -> bool:
        return self._embedding is not None

    def widen(self, tokens: Sequence[int]) -> None:
        """Compute the logits of these tokens too, behind those of the head, until the next call."""
        assert self._embedding is not None, "only a tied head knows other tokens"
        if (more := tuple(tokens)) != self._more:
            rows: Any = copy.copy(self._embedding)
            keep_rows(rows, np.array(more, np.int32))
            self._more, self.parts = more, [self.parts[0], *([rows] if more else [])]

    def __call__(self, hidden: mx.array) -> mx.array:
        logits = [part(hidden) if self._embedding is None else part.as_linear(hidden) for part in self.parts]
        return mx.concatenate(logits, axis=-1) if len(logits) > 1 else logits[0]
