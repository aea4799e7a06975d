"""A head that computes the logits of some tokens of the vocabulary only. Knows no file and no candidates."""

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from draft_worker.head_tokens import HeadTokens
from protocol.inference.narrow_weights import keep_narrow


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
    mx.eval(module.parameters())


class ShortHead(nn.Module):
    """Logits (..., len(tokens)). `head` is an embedding or a linear layer, quantised or not.

    A `tied` head's embedding stays in memory, so it can compute any other token's logits too: see `widen`.
    """

    def __init__(self, head: nn.Module, tokens: HeadTokens, *, tied: bool) -> None:
        super().__init__()
        rows: Any = copy.copy(head)
        keep_rows(rows, tokens)
        keep_narrow(rows)
        self._rows = rows.as_linear if tied else rows
        self._embedding = head if tied else None
        self._more: tuple[int, ...] = ()
        self._more_rows: Any = None

    @property
    def widens(self) -> bool:
        return self._embedding is not None

    def widen(self, tokens: Sequence[int]) -> None:
        """Compute the logits of these tokens too, behind those of the head, until the next call."""
        assert self._embedding is not None, "only a tied head knows other tokens"
        if (more := tuple(tokens)) != self._more:
            rows: Any = copy.copy(self._embedding)
            keep_rows(rows, np.array(more, np.int32))
            self._more, self._more_rows = more, rows.as_linear

    def __call__(self, hidden: mx.array) -> mx.array:
        logits = self._rows(hidden)
        return mx.concatenate([logits, self._more_rows(hidden)], axis=-1) if self._more else logits
