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


def keep_rows(module: nn.Module, tokens: HeadTokens) -> None:
    """Keep these tokens' rows of an embedding or a linear layer, quantised or not."""
    chosen = mx.array(tokens)
    # Every parameter of such a layer has a row a token.
    module.update({name: values[chosen] for name, values in module.parameters().items()})
    mx.eval(module.parameters())


class ShortHead(nn.Module):
    """Logits (..., len(tokens)). `head` is an embedding or a linear layer, quantised or not."""

    def __init__(self, head: nn.Module, tokens: HeadTokens, *, tied: bool) -> None:
        super().__init__()
        rows: Any = copy.copy(head)
        keep_rows(rows, tokens)
        self._rows = rows.as_linear if tied else rows

    def __call__(self, hidden: mx.array) -> mx.array:
        return self._rows(hidden)
