"""Attention to latent keys: few queries attend to the latents themselves. Knows no sequence and no kind of cache.

A token's latent c, of r numbers, stands for keys K c and values V c of every head. A query q gives the same output in
two forms (DeepSeek-V2, arXiv 2405.04434, section 2.1.2):

    expanded   attention of q to K c and V c, which are computed for all tokens of the context
    absorbed   V of the attention of K^T q to c and c

mlx-lm's layers absorb one query and expand for more, which takes time for the whole context whatever the number of
queries. Their expansions are lazy: they are observed, and nothing of them is computed where attention does not use
them. The form follows from sizes alone, and a query in a narrow forward has the form that it has alone.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from protocol.inference.observed_modules import modules_of, observe

NARROW = 32
"""Up to so many queries are absorbed, however short the context is: the same form as for one."""
_ATTENTION = "scaled_dot_product_attention"
_KEYS, _VALUES = "embed_q", "unembed_out"
"""A layer's K and V, by their names in mlx-lm's layers."""
_MATRICES = MultiLinear, QuantizedMultiLinear


def let_latents_be_absorbed(network: Any) -> None:
    """Let the layers of this network that expand latents absorb few queries."""
    for layer in modules_of(network):
        module: Any = sys.modules[type(layer).__module__]
        inner: Any = getattr(module, _ATTENTION, None)
        keys, values = getattr(layer, _KEYS, None), getattr(layer, _VALUES, None)
        if not callable(inner) or not isinstance(keys, _MATRICES) or not isinstance(values, _MATRICES):
            continue
        if not isinstance(inner, _AbsorbingAttention):
            setattr(module, _ATTENTION, _AbsorbingAttention(inner))
        observe(keys, _Seen.keys_expanded)
        observe(values, _Seen.values_expanded)


def is_absorbed(queries: int, tokens: int, rank: int, sizes: int) -> bool:
    """Whether so many queries are absorbed, behind so many tokens of latents of `rank` numbers. `sizes`: of a head's
    key and value together.

    Beyond narrow forwards the form that needs fewer products: L (2 T r + r s) absorbed, T r s + L T s expanded.
    """
    return queries <= NARROW or queries * (rank * (2 * tokens + sizes) - tokens * sizes) < tokens * rank * sizes


class _Expansion(NamedTuple):
    """Of latents by one of a layer's matrices."""

    matrix: Any
    latents: mx.array
    result: mx.array


class _Seen:
    """What the layer at work has expanded since the last attention. A forward is built in one thread."""

    keys: _Expansion | None = None
    values: _Expansion | None = None

    @classmethod
    def keys_expanded(cls, matrix: Any, arguments: tuple[Any, ...], result: Any) -> Any:
        # Queries are multiplied by the transpose, without a second argument.
        if len(arguments) > 1 and not arguments[1]:
            cls.keys = _Expansion(matrix, arguments[0], result)
        return result

    @classmethod
    def values_expanded(cls, matrix: Any, arguments: tuple[Any, ...], result: Any) -> Any:
        if cls.keys is not None and cls.keys.latents is arguments[0]:
            cls.values = _Expansion(matrix, arguments[0], result)
        return result

    @classmethod
    def take(cls) -> tuple[_Expansion | None, _Expansion | None]:
        seen = cls.keys, cls.values
        cls.keys = cls.values = None
        return seen


class _AbsorbingAttention:
    """The attention of a module of mlx-lm, by whose name its layers call this."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self._inner = inner

    def __call__(self, queries: mx.array, keys: Any, values: Any, *others: Any, **named: Any) -> Any:
        k, v = _Seen.take()
        if k is None or v is None or keys is not k.result or values is not v.result:
            return self._inner(queries, keys, values, *others, **named)
        sizes = keys.shape[-1] + values.shape[-1]
        if not is_absorbed(queries.shape[2], keys.shape[2], k.latents.shape[-1], sizes):
            return self._inner(queries, keys, values, *others, **named)
        return v.matrix(self._inner(k.matrix(queries), k.latents, k.latents, *others, **named))
