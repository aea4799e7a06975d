"""A head that computes logits for some tokens of the vocabulary only, named by a file beside the model.

A draft reads its head at every growth step. Most of the vocabulary is almost never the target's next token. Any other
program reads the same folder as an ordinary model.
"""

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from protocol.errors import InputError

FILE = "head_tokens.npy"
"""Ascending int32 tokens."""


def shorten_head(network: Any, folder: Path) -> None:
    """Give the mlx-lm model the head that the folder's file describes; without the file nothing changes.

    Raises InputError if the file does not fit the model.
    """
    file = folder / FILE
    if not file.exists():
        return
    tied = network.args.tie_word_embeddings
    head = network.model.embed_tokens if tied else network.lm_head
    network.lm_head = ShortHead(head, _tokens(file, network.args.vocab_size), network.args.vocab_size, tied=tied)
    network.args.tie_word_embeddings = False


class ShortHead(nn.Module):
    """Logits (..., V): -inf but for `tokens`. `head` is an embedding or a linear layer, quantised or not."""

    def __init__(self, head: nn.Module, tokens: np.ndarray, vocabulary: int, *, tied: bool) -> None:
        super().__init__()
        self._tokens = mx.array(tokens)
        self._vocabulary = vocabulary
        # Every parameter of such a layer has a row a token.
        rows: Any = copy.copy(head)
        rows.update({name: values[self._tokens] for name, values in head.parameters().items()})
        self._rows = rows.as_linear if tied else rows
        mx.eval(rows.parameters())

    def __call__(self, hidden: mx.array) -> mx.array:
        logits = self._rows(hidden)
        impossible = mx.full((*logits.shape[:-1], self._vocabulary), -mx.inf, logits.dtype)
        # A tenth of the time that an assignment by index takes.
        return mx.put_along_axis(impossible, mx.broadcast_to(self._tokens, logits.shape), logits, axis=-1)


def _tokens(file: Path, vocabulary: int) -> np.ndarray:
    try:
        tokens = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{file} can't be read ({error}): convert or train the draft again.") from error
    ascending = tokens.ndim == 1 and tokens.dtype == np.int32 and (np.diff(tokens) > 0).all()
    if not ascending or not len(tokens) or tokens[0] < 0 or tokens[-1] >= vocabulary:
        raise InputError(f"{file} must hold ascending int32 tokens below {vocabulary}: train the draft again.")
    return tokens
