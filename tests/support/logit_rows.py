"""Rows of logits for property tests, and a spy on MLX's sorts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

_SORTS = ("sort", "argsort", "topk", "partition", "argpartition")


def rows(rough: str, count: int, width: int, seed: int) -> np.ndarray:
    """(count, width) float32 logits of one kind: see `KINDS`."""
    source = np.random.default_rng(seed)
    logits = source.normal(scale=3.0, size=(count, width))
    match rough:
        case "tied":
            logits = np.round(logits)
        case "equal":
            logits = np.full((count, width), 1.5)
        case "masked":
            logits[source.random((count, width)) < 0.9] = -np.inf
            logits[:, 0] = 0.0
        case "single":
            logits = np.full((count, width), -np.inf)
            logits[:, width // 2] = -4.0
        case "certain":
            logits[:, width // 3] = 200.0
        case "half":
            logits = logits.astype(np.float16)
    return logits.astype(np.float32)


KINDS = ("normal", "tied", "equal", "masked", "single", "certain", "half")


@st.composite
def logit_rows(draw: st.DrawFn, widths: tuple[int, ...] = (1, 2, 7, 64, 300, 1000, 5000)) -> np.ndarray:
    """A few rows of one kind."""
    width = draw(st.sampled_from(widths))
    return rows(draw(st.sampled_from(KINDS)), draw(st.integers(1, 4)), width, draw(st.integers(0, 1 << 30)))


@contextmanager
def sorted_widths() -> Iterator[list[int]]:
    """The length of the last axis of every sort that MLX is asked for in the block."""
    widths: list[int] = []

    def spied(sort: Any) -> Any:
        def call(array: mx.array, *arguments: Any, **keywords: Any) -> mx.array:
            widths.append(array.shape[-1])
            return sort(array, *arguments, **keywords)

        return call

    with mock.patch.multiple(mx, **{name: spied(getattr(mx, name)) for name in _SORTS}):
        yield widths
