"""Implementations of `LayerCache`, one module each. A new module of this package registers itself.

An implementation knows one layer of one sequence; no trees, no messages.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeAlias

from mlx_lm.models.cache import ArraysCache, CacheList

from protocol.inference.layer_cache import LAYER_CACHES, LayerCache
from protocol.inference.layer_caches.state import ReplacedArrays, StockCache
from protocol.messages.base import Level

Layer: TypeAlias = LayerCache | list[LayerCache]
"""One layer's cache, or the caches of a layer that has several."""


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
    _import_implementations()
    kind: type[object] = stock.__class__
    if level != "tree" and kind is ArraysCache:
        return ReplacedArrays(stock)
    try:
        return LAYER_CACHES.get(kind, StockCache)(stock)
    except LookupError:
        return StockCache(stock)


@cache
def _import_implementations() -> None:
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
