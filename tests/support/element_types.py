"""Which element types a network computes in."""

from collections.abc import Callable
from typing import Any, TypeAlias

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import mla, switch_layers

from draft_worker.conditioned.runner import ConditionedRunner
from draft_worker.drafters.block_forward import MlxBlockRunner
from draft_worker.drafters.peagle import PeagleRunner
from protocol.inference.tree_sequence import TreeSequence

Seen: TypeAlias = set[tuple[int | str, mx.Dtype]]
"""Where a type was seen: a module by its id, or a call by its name."""
_LINEAR = (
    *(nn.Linear, nn.QuantizedLinear, switch_layers.SwitchLinear, switch_layers.QuantizedSwitchLinear),
    *(mla.MultiLinear, mla.QuantizedMultiLinear),
)
_CALLS: tuple[tuple[Any, str], ...] = (
    *((kind, "__call__") for kind in _LINEAR),
    *((kind, "as_linear") for kind in (nn.Embedding, nn.QuantizedEmbedding)),
    (mx.fast, "scaled_dot_product_attention"),
    *((kind, "forward") for kind in (ConditionedRunner, MlxBlockRunner, PeagleRunner)),
    (ConditionedRunner, "logits"),
)


def watch(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """From now on: the types of floats that linear layers read, hold and give, that attention reads, and of drafters'
    outputs, logits, keys and values."""
    seen: Seen = set()
    for owner, name in _CALLS:
        monkeypatch.setattr(owner, name, _watched(getattr(owner, name), name, seen))
    return seen


def _watched(inner: Callable[..., Any], name: str, seen: Seen) -> Callable[..., Any]:
    def call(*arguments: Any, **others: Any) -> Any:
        found = inner(*arguments, **others)
        first = arguments[0]
        place = id(first) if isinstance(first, nn.Module) else name
        leaves: Any = tree_flatten([arguments, others, found])
        kept = [cache.arrays for _, leaf in leaves if isinstance(leaf, TreeSequence) for cache in leaf.caches]
        seen.update((place, element) for element in types_of([arguments, others, found, kept]))
        return found

    return call


def types_of(arrays: Any) -> set[mx.Dtype]:
    """Those of floats in a structure of arrays and other things."""
    leaves: Any = tree_flatten(arrays)
    return {leaf.dtype for _, leaf in leaves if isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)}


def let_experts_run_in_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's processor backend has the products of experts in float32 alone."""
    inner: Any = mx.gather_mm

    def gather_mm(a: mx.array, b: mx.array, *arguments: Any, **others: Any) -> mx.array:
        found: mx.array = inner(a.astype(mx.float32), b.astype(mx.float32), *arguments, **others)
        return found.astype(a.dtype)

    monkeypatch.setattr(mx, "gather_mm", gather_mm)
