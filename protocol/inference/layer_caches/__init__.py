"""Implementations of `LayerCache`, by the class of mlx-lm that each replaces.

An implementation knows one layer of one sequence; no trees, no messages.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from protocol.inference.layer_cache import LayerCache
from protocol.inference.layer_caches.full_attention import ChunkCache, FullAttentionCache, WindowCache
from protocol.inference.layer_caches.recurrent import RecurrentCache
from protocol.inference.layer_caches.state import ReplacedArrays, StockCache
from protocol.messages.base import Level

Layer: TypeAlias = LayerCache | list[LayerCache]
"""One layer's cache, or the caches of a layer that has several."""
IMPLEMENTATIONS: dict[type, Callable[[Any], LayerCache]] = {
    KVCache: FullAttentionCache,
    RotatingKVCache: WindowCache,
    ChunkedKVCache: ChunkCache,
    ArraysCache: RecurrentCache,
}
"""Not of subclasses, which mlx-lm may use in another way."""


def replaced(stock: Any, level: Level) -> Layer:
    """Empty caches in place of mlx-lm's `stock`."""
    if isinstance(stock, CacheList):
        parts: tuple[object, ...] = vars(stock)["caches"]
        return [layer_cache(part, level) for part in parts]
    return layer_cache(stock, level)


def flat(layers: Sequence[Layer]) -> list[LayerCache]:
    """The caches of all layers."""
    return [cache for layer in layers for cache in (layer if isinstance(layer, list) else [layer])]


def alike(layers: Sequence[Layer], flat: Sequence[Any]) -> list[Any]:
    """`flat` in the structure of `layers`."""
    rest = iter(flat)
    return [[next(rest) for _ in layer] if isinstance(layer, list) else next(rest) for layer in layers]


def layer_cache(stock: Any, level: Level) -> LayerCache:
    """An empty cache in place of mlx-lm's `stock`, which may hold trees at level tree only."""
    kind: type[object] = stock.__class__
    if level != "tree" and kind is ArraysCache:
        return ReplacedArrays(stock)
    try:
        return IMPLEMENTATIONS.get(kind, StockCache)(stock)
    except LookupError:
        return StockCache(stock)
