"""Trees of several sequences in one forward: the weights are read once, attention runs sequence by sequence.

The models of mlx-lm call `scaled_dot_product_attention` by a name in their module, and during a joint forward this
module wraps the function behind that name. Knows no messages, sampling or time.
"""

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from protocol.inference.layer_cache import ForwardShape, LayerCache, MaskKind, TreePositions
from protocol.inference.layer_caches.full_attention import FullAttentionCache
from protocol.inference.layer_caches.recurrent import RecurrentCache, initialise_arrays
from protocol.inference.path_sequence import PathSequence
from protocol.inference.processor_attention import processor_operations
from protocol.inference.recurrence import Recurrence, ShortConvolution, reading, reads
from protocol.inference.tree_sequence import Tokens, TreeSequence, as_array

_ATTENTION = "scaled_dot_product_attention"
_WITH_ATTENTION: set[ModuleType] = set()
"""Modules of mlx-lm that have it, and whose layers may join."""


class ForwardPart(NamedTuple):
    """One sequence's part of a forward: the arguments of its `TreeSequence.evaluate`."""

    sequence: TreeSequence | PathSequence
    tokens: Tokens
    parents: Sequence[int]
    first: int | None = None

    def evaluate(self) -> mx.array:
        """(L, V) logits of this part alone."""
        if isinstance(self.sequence, TreeSequence):
            return self.sequence.evaluate(self.tokens, self.parents, self.first)
        assert not isinstance(self.tokens, mx.array), "below level tree, tokens may be evaluated again"
        return self.sequence.evaluate(self.tokens, self.parents)


def can_join(layers: Iterable[Any]) -> bool:
    """Let attention in the Python modules of these layers accept a `JointCache` in joint forwards. Returns whether
    there is any, or any recurrence."""
    layers = list(layers)
    modules = {sys.modules[type(layer).__module__] for layer in layers}
    modules = {module for module in modules if callable(getattr(module, _ATTENTION, None))}
    _WITH_ATTENTION.update(modules)
    return bool(modules) or any(isinstance(layer, ShortConvolution) for layer in layers)


def evaluate_together(network: Any, parts: Sequence[ForwardPart]) -> list[mx.array]:
    """(L, V) logits of each part, which may not be computed yet, as its sequence alone would give them."""
    sequences = [part.sequence for part in parts if isinstance(part.sequence, TreeSequence)]
    lengths = [len(part.tokens) for part in parts]
    forwards = [
        sequence.begin(part.parents, part.first, length - len(part.parents))
        for sequence, part, length in zip(sequences, parts, lengths, strict=True)
    ]
    positions = mx.concatenate([_positions(*each) for each in zip(forwards, lengths, strict=True)])
    layers = zip(*(sequence.caches for sequence in sequences), strict=True)
    caches = sequences[0].alike([_joint(layer, lengths, positions) for layer in layers])
    tokens = mx.concatenate([as_array(part.tokens) for part in parts])
    with reading(), processor_operations(), _joint_attention():
        logits = mx.flatten(network(tokens[None], cache=caches), 0, -2)
    _divide_recorded(sequences, lengths)
    return _divided(logits, lengths, axis=0)


def _divide_recorded(sequences: Sequence[TreeSequence], lengths: Sequence[int]) -> None:
    """Give each sequence what its own tokens left."""
    tap = sequences[0].tap
    recorded = tap and tap.take()
    end = 0
    for sequence, length in zip(sequences, lengths, strict=True):
        end += length
        sequence.recorded = recorded and recorded.part(end - length, end)


def _joint(
    layer: tuple[LayerCache, ...], lengths: Sequence[int], positions: mx.array
) -> "JointCache | JointRecurrence":
    recurrent = [cache for cache in layer if isinstance(cache, RecurrentCache)]
    rows = [cache for cache in layer if isinstance(cache, FullAttentionCache)]
    return JointRecurrence(recurrent, lengths) if recurrent else JointCache(rows, lengths, positions)


class JointCache:
    """One layer's caches of several sequences, whose tokens are concatenated in the forward."""

    def __init__(self, parts: Sequence[FullAttentionCache], lengths: Sequence[int], positions: mx.array) -> None:
        self.offset = TreePositions(positions)
        """Only a language model's rope can read it."""
        self.parts = parts
        self._lengths = lengths
        self._fetched: list[tuple[Any, Any]] = []
        """Keys and values of each part, after `update_and_fetch`."""

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> MaskKind:
        """None: every sequence has its own mask. Raises ValueError for a window that the parts don't have themselves:
        only one layer of several is asked for the mask."""
        if window_size is not None and any(part.window != window_size for part in self.parts):
            raise ValueError("the window is not that of the cache")
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write (1, heads, L, size) to the cache of each sequence, from which `attend` reads."""
        divided = zip(_divided(keys, self._lengths, 2), _divided(values, self._lengths, 2), strict=True)
        self._fetched = [part.update_and_fetch(*each) for part, each in zip(self.parts, divided, strict=True)]
        return keys, values

    def attend(self, attention: Callable[..., mx.array], queries: mx.array, scale: float, **others: Any) -> mx.array:
        """(1, heads, L, size): every token attends to its own sequence."""
        attended: list[mx.array] = []
        divided = _divided(queries, self._lengths, 2)
        for part, query, (keys, values) in zip(self.parts, divided, self._fetched, strict=True):
            mask = part.make_mask(query.shape[2])
            attended.append(attention(query, keys, values, cache=part, scale=scale, mask=mask, **others))
        return mx.concatenate(attended, axis=2)


class JointRecurrence(ArraysCache):
    """The same for a recurrent layer: every sequence's tokens run from its own states."""

    def __init__(self, parts: Sequence[RecurrentCache], lengths: Sequence[int]) -> None:
        initialise_arrays(self, len(parts[0].entries))
        self._parts = parts
        self._lengths = lengths

    def __getitem__(self, index: int) -> Any:
        """The states of one sequence stand for all: only `recur` and `convolve` use them."""
        reads(self)
        return self._parts[0].entries[index]

    def __setitem__(self, index: int, entry: Any) -> None:
        """The parts have their states from `recur` and `convolve`."""

    def recur(self, recurrence: Recurrence, arguments: dict[str, Any]) -> tuple[mx.array, mx.array]:
        kind = recurrence.kind
        inputs = zip(*(_divided(arguments[name], self._lengths, kind.axis) for name in kind.inputs), strict=True)
        outputs: list[mx.array] = []
        for part, arrays in zip(self._parts, inputs, strict=True):
            own = dict(zip(kind.inputs, arrays, strict=True)) | {kind.state: part.entries[recurrence.entry]}
            output, state = part.recur(recurrence, {**arguments, **own})
            part.put(recurrence.entry, state)
            outputs.append(output)
        return mx.concatenate(outputs, axis=kind.axis), mx.zeros((0,))

    def convolve(self, convolution: ShortConvolution, x: mx.array) -> mx.array:
        state, rows = mx.split(x, [x.shape[1] - sum(self._lengths)], axis=1)
        outputs: list[mx.array] = []
        for part, own in zip(self._parts, _divided(rows, self._lengths, 1), strict=True):
            before = part.entries[convolution.entry]
            whole = mx.concatenate([mx.zeros_like(state) if before is None else before, own], axis=1)
            part.put(convolution.entry, whole[:, own.shape[1] :])
            outputs.append(part.convolve(convolution, whole))
        return mx.concatenate(outputs, axis=1)


@contextmanager
def _joint_attention() -> Generator[None]:
    """While it lasts, the models' attention runs once a sequence for a `JointCache`. A lone sequence's forwards, whose
    layers the device waits for, call it as it is."""
    stock = {module: vars(module)[_ATTENTION] for module in _WITH_ATTENTION}
    for module, inner in stock.items():
        setattr(module, _ATTENTION, partial(_attend, inner))
    try:
        yield
    finally:
        for module, inner in stock.items():
            setattr(module, _ATTENTION, inner)


def _attend(
    inner: Callable[..., mx.array],
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any = None,
    scale: float = 1.0,
    mask: MaskKind = None,
    **others: Any,
) -> mx.array:
    if isinstance(cache, JointCache):
        return cache.attend(inner, queries, scale, **others)
    return inner(queries, keys, values, cache=cache, scale=scale, mask=mask, **others)


def _positions(forward: ForwardShape, length: int) -> mx.array:
    return mx.arange(forward.begin, forward.begin + length) if forward.positions is None else forward.positions


def _divided(array: mx.array, lengths: Sequence[int], axis: int) -> list[mx.array]:
    ends = list(accumulate(lengths))[:-1]
    return list(mx.split(array, ends, axis=axis))
