"""The windows that a model's caches state. Knows nothing of how attention uses them."""

from collections.abc import Iterable, Iterator

from mlx_lm.models.cache import CacheList

_WINDOW_NAMES = ("max_size", "chunk_size")
"""Attributes of mlx-lm's caches that hold a window, in tokens."""


def impossible_windows(caches: Iterable[object]) -> list[object]:
    """What mlx-lm's caches hold as windows that is no whole number above 0. mlx-lm takes it from config.json as it is,
    and a window of 0 tokens gives logits without an error."""
    return [window for window in _windows(caches) if type(window) is not int or window < 1]


def _windows(caches: Iterable[object]) -> Iterator[object]:
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from _windows(cache.caches)
        else:
            yield from (getattr(cache, name) for name in _WINDOW_NAMES if hasattr(cache, name))
