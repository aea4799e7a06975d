"""A head that computes the logits of some tokens of the vocabulary only. Knows no file and no candidates."""

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from draft_worker.head_tokens import HeadTokens


def shorten_head(network: Any, tokens: HeadTokens) -> None:
    """Let the mlx-lm model compute logits of these tokens alone: column c is token `tokens[c]`."""
    tied = network.args.tie_word_embeddings
    network.lm_head = ShortHead(network.model.embed_tokens if tied else network.lm_head, tokens, tied=tied)
    network.args.tie_word_embeddings = False


class ShortHead(nn.Module):
    """Logits (..., len(tokens)). `head` is an embedding or a linear layer, quantised or not."""

    def __init__(self, head: nn.Module, tokens: HeadTokens, *, tied: bool) -> None:
        super().__init__()
        # Every parameter of such a layer has a row a token.
        rows: Any = copy.copy(head)
        chosen = mx.array(tokens)
        rows.update({name: values[chosen] for name, values in head.parameters().items()})
        self._rows = rows.as_linear if tied else rows
        mx.eval(rows.parameters())

    def __call__(self, hidden: mx.array) -> mx.array:
        return self._rows(hidden)
