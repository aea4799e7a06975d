"""Recurrences and short convolutions of mlx-lm's layers: they record their inputs, and run over trees.

The models of mlx-lm call a recurrence by a name in their module, and this module wraps the function behind that name,
and every depthwise convolution. Whose tokens they are is said by the cache that the layer has read last. Knows no
sequence.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn

from protocol.inference.ancestry import Ancestry, ancestry
from protocol.inference.tree_recurrences import (
    gated_delta_state,
    gated_delta_tree,
    linear_attention_tree,
    state_space_tree,
)

TreeForm = Callable[[Mapping[str, Any], Ancestry], mx.array]
"""From a call's arguments over all rows: the outputs of all rows, or the state behind the last one of a path."""


class RecurrenceKind(NamedTuple):
    """What a function of mlx-lm computes."""

    inputs: tuple[str, ...]
    """Its arguments that hold one entry a token."""
    axis: int
    """The axis of tokens in these, and in its first result. The second result is the state."""
    state: str
    """The argument that holds the state before the first token."""
    over_tree: TreeForm
    behind_path: TreeForm | None = None
    """The state behind a path. None: mlx-lm's own function does not go token by token."""


KINDS = {
    "gated_delta_update": RecurrenceKind(("q", "k", "v", "a", "b"), 1, "state", gated_delta_tree, gated_delta_state),
    "ssm_update": RecurrenceKind(("hidden_states", "B", "C", "dt"), 1, "state", state_space_tree),
    "recurrent_gla": RecurrenceKind(("q", "k", "v"), 2, "h", linear_attention_tree),
}
"""By the name in mlx-lm's modules."""


class Recorder(Protocol):
    """The cache of a recurrent layer."""

    def recur(self, recurrence: "Recurrence", arguments: dict[str, Any]) -> tuple[mx.array, mx.array]:
        """Outputs and the state behind them, in place of the recurrence's own."""
        ...

    def convolve(self, convolution: "ShortConvolution", x: mx.array) -> mx.array:
        """(1, L, D) outputs from (1, K - 1 + L, D), which begins with the state."""
        ...


class _Reading:
    """The recorder whose layer is at work. A forward is built in one thread, layer by layer."""

    recorder: Recorder | None = None


def reads(recorder: Recorder) -> None:
    """The layer of this recorder is at work from now on."""
    _Reading.recorder = recorder


@contextmanager
def reading() -> Iterator[None]:
    """Recorders are read inside."""
    try:
        yield
    finally:
        _Reading.recorder = None


class Recurrence:
    """A function of mlx-lm, by whose name its models call this."""

    def __init__(self, inner: Callable[..., tuple[mx.array, mx.array]], kind: RecurrenceKind) -> None:
        self.inner = inner
        self.kind = kind
        self.entry = -1
        """The entry of mlx-lm's cache that holds its state, once a forward has shown it."""
        self._signature = signature(inner)

    def __call__(self, *arguments: Any, **others: Any) -> tuple[mx.array, mx.array]:
        if _Reading.recorder is None:
            return self.inner(*arguments, **others)
        return _Reading.recorder.recur(self, self._signature.bind(*arguments, **others).arguments)

    def goes_by_token(self, tokens: int) -> bool:
        """The function itself would go over so many tokens one by one: without a GPU mlx-lm has no kernel for them."""
        return tokens > 1 and self.kind.behind_path is not None and mx.default_device() == mx.Device(mx.cpu)

    def state_behind(self, arguments: Mapping[str, Any]) -> mx.array:
        """The state behind the tokens of these arguments."""
        tokens = arguments[self.kind.inputs[0]].shape[self.kind.axis]
        if self.kind.behind_path is not None and self.goes_by_token(tokens):
            return self.kind.behind_path(arguments, ancestry(tuple(range(-1, tokens - 1))))
        return self.run(arguments)[1]

    def run(self, arguments: Mapping[str, Any]) -> tuple[mx.array, mx.array]:
        """The function itself."""
        call = self._signature.bind_partial()
        call.arguments.update(arguments)
        return self.inner(*call.args, **call.kwargs)


class ShortConvolution(nn.Module):
    """A depthwise convolution over the last tokens of each path."""

    def __init__(self, inner: nn.Conv1d) -> None:
        super().__init__()
        self.inner = inner
        self.entry = -1
        """The entry of mlx-lm's cache that holds its last inputs, once a forward has shown it."""

    def __call__(self, x: mx.array) -> mx.array:
        if _Reading.recorder is None:
            return self.inner(x)
        return _Reading.recorder.convolve(self, x)

    def __getattr__(self, name: str) -> Any:
        # Some layers read the weight.
        if name in self or "inner" not in self:
            return super().__getattr__(name)
        return getattr(self["inner"], name)


def let_recurrences_record(model: nn.Module) -> None:
    """Wrap the recurrences and the short convolutions of this model's layers."""
    modules = {sys.modules[type(layer).__module__] for layer in model.modules()}
    for module in modules:
        for name, kind in KINDS.items():
            inner: Any = vars(module).get(name)
            if inner is not None and not isinstance(inner, Recurrence):
                setattr(module, name, Recurrence(inner, kind))
    for layer in model.modules():
        if isinstance(layer, ShortConvolution):
            continue
        for name, part in layer.children().items():
            if isinstance(part, nn.Conv1d) and part.groups > 1:
                setattr(layer, name, ShortConvolution(part))
