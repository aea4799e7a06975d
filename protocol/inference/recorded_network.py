"""Logits of a text that is known already, and a network that returns them to mlx-lm's own loops. Knows no file."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx


def point_logits(tokens: Sequence[int], vocabulary: int) -> mx.array:
    """(L, V) float32: row i is 0 at `tokens[i]` and -inf elsewhere.

    Every sampler chooses that token: temperature, noise, filters, penalties and biases are finite and change neither
    the only finite logit to -inf nor another one to a finite logit.
    """
    points = mx.arange(vocabulary)[None] == mx.array(list(tokens))[:, None]
    return mx.where(points, 0.0, -mx.inf)


class KnownText:
    """A prompt and the tokens behind it, by absolute position."""

    def __init__(self, tokens: Sequence[int], vocabulary: int) -> None:
        self.tokens = tuple(tokens)
        self._vocabulary = vocabulary

    def logits(self, positions: Sequence[int]) -> mx.array:
        """(L, V) logits behind the tokens at these positions. Behind the text's last token, they choose that token."""
        last = len(self.tokens) - 1
        return point_logits([self.tokens[min(position + 1, last)] for position in positions], self._vocabulary)


class RecordedNetwork:
    """Stands in for a model in mlx-lm's `generate_step` and `speculative_generate_step`. It has no weights and no KV.

    The logits depend on positions only. Where the tokens in a call are not the text's, mlx-lm rejects them in the same
    round, and reads no logits behind them.
    """

    layers = (None,)
    """mlx-lm divides the caches of target and draft by the number of the target's layers."""

    def __init__(self, text: KnownText) -> None:
        self._text = text

    def make_cache(self) -> list["PositionCache"]:
        return [PositionCache()]

    def __call__(self, tokens: mx.array, cache: Sequence["PositionCache"]) -> mx.array:
        """(1, L) tokens to (1, L, V) logits."""
        begin = cache[0].offset
        cache[0].offset += tokens.shape[-1]
        return self._text.logits(range(begin, cache[0].offset))[None]


class PositionCache:
    """The cache of a recorded network: the number of tokens so far."""

    def __init__(self) -> None:
        self.offset = 0

    @property
    def state(self) -> list[Any]:
        """Arrays to evaluate: none."""
        return []

    def is_trimmable(self) -> bool:
        return True

    def trim(self, count: int) -> int:
        """Forget the last `count` tokens. Returns how many there were to forget."""
        trimmed = min(self.offset, count)
        self.offset -= trimmed
        return trimmed
