"""A sequence in mlx-lm's own caches that can return to its context. Knows nothing of ours."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache


class StockSequence:
    """Forwards behind one context."""

    def __init__(self, network: Any, context: Sequence[int]) -> None:
        self._network = network
        self._caches = make_prompt_cache(network)
        self._written = 0
        """Tokens behind the context."""
        mx.eval(network(mx.array([list(context)]), cache=self._caches))
        # A cache that can be trimmed now is trimmed later; the others get a copy of what they hold now.
        self._saved = [None if cache.is_trimmable() else _copied(vars(cache)) for cache in self._caches]

    def evaluate(self, tokens: Sequence[int]) -> mx.array:
        """(L, V) logits, not yet computed."""
        self._written += len(tokens)
        return self._network(mx.array([list(tokens)]), cache=self._caches)[0]

    def undo(self) -> None:
        """Return to the context; computed on return."""
        for cache, saved in zip(self._caches, self._saved, strict=True):
            if saved is None:
                cache.trim(self._written)
            else:
                vars(cache).update(_copied(saved))
        self._written = 0


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """In memory of its own, which a forward may overwrite."""
    copied = tree_map(lambda leaf: leaf + mx.zeros((), leaf.dtype) if isinstance(leaf, mx.array) else leaf, state)
    mx.eval(copied)
    return copied
