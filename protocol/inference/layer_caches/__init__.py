"""Implementations of `LayerCache`, one module each. A new module of this package registers itself.

An implementation knows one layer of one sequence; no trees, no messages.
"""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from protocol.inference.layer_cache import LAYER_CACHES, LayerCache


def layer_cache(stock: Any) -> LayerCache:
    """An empty cache in place of mlx-lm's `stock`. Raises LookupError, with the reason, for a class without one."""
    _import_implementations()
    implementation = LAYER_CACHES.get(type(stock))
    if implementation is None:
        raise LookupError(f"its {type(stock).__name__} forgets or folds tokens")
    return implementation(stock)


@cache
def _import_implementations() -> None:
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
