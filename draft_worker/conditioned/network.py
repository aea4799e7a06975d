"""A drafter's network as `LanguageModel` runs one: the second input of each row is set before the forward.

Knows no features and no tree.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from draft_worker.head_tokens import HeadTokens

_MOST = 3e4
"""Larger numbers don't survive a product in half precision."""


class ConditionedDrafter(Protocol):
    """A network whose row i joins the feature of token i with the embedding of token i + 1."""

    head_tokens: HeadTokens | None

    def fuse(self, features: mx.array) -> mx.array:
        """(..., width) from (..., outputs * output width) features."""
        ...

    def __call__(self, tokens: mx.array, hidden: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """(B, L, width), what the next row may read in place of a fused feature."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """(..., head) from outputs."""
        ...

    def make_cache(self) -> list[Any]: ...


class ConditionedNetwork(nn.Module):
    """Called as an mlx-lm model; its "logits" are the rows' outputs, from which the drafter's head makes logits."""

    def __init__(self, drafter: ConditionedDrafter, width: int, config: Mapping[str, Any]) -> None:
        """`config`: `model_type`, and `max_position_embeddings` if the context is bounded."""
        super().__init__()
        self.drafter = drafter
        self._width = width
        self.config = dict(config)
        self._hidden: mx.array | None = None

    def read(self, hidden: mx.array | None) -> None:
        """Set the (L, width) second input of the next forward; None: zeros."""
        self._hidden = None if hidden is None else hidden[None]

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        hidden = self._hidden
        if hidden is None:
            hidden = mx.zeros((*tokens.shape, self._width))
        layer = cache[0] if isinstance(cache, list) else cache
        return bounded(self.drafter(tokens, hidden, cache=layer))

    def make_cache(self) -> list[Any]:
        return self.drafter.make_cache()


def bounded(hidden: mx.array) -> mx.array:
    """Without NaN and without infinities: one such key would spoil every later row, even a masked one."""
    return mx.clip(mx.nan_to_num(hidden, nan=0.0, posinf=_MOST, neginf=-_MOST), -_MOST, _MOST)
