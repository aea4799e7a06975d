"""Recurrences and short convolutions of mlx-lm's layers: they record their inputs, and run over trees.

The models of mlx-lm call a recurrence by a name in their module, and this module wraps the function behind that name,
and every depthwise convolution. Whose tokens they are is said by the cache that the layer has read last. Knows no
sequence.
"""

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx import nn

from protocol.inference.observed_modules import modules_of
from protocol.inference.recurrences.ancestry import Ancestry
from protocol.inference.recurrences.tree_recurrences import (
    Unrolled,
    gated_delta_path,
    gated_delta_tree,
    linear_attention_tree,
    state_space_tree,
)

TreeForm = Callable[[Mapping[str, Any], Ancestry], Unrolled]
"""From a call's arguments over all rows."""


class RecurrenceKind(NamedTuple):
    """What a function of mlx-lm computes."""

    inputs: tuple[str, ...]
    """Its arguments that hold one entry a token."""
    axis: int
    """The axis of tokens in these, and in its first result. The second result is the state."""
    state: str
    """The argument that holds the state before the first token."""
    over_tree: TreeForm
    over_path: Callable[[Mapping[str, Any]], tuple[mx.array, mx.array]] | None = None
    """The function over one path of many tokens, faster than mlx-lm's without a GPU."""
    two_forms: bool = False
    """On a GPU, mlx-lm computes one token in float32, and several of them in part in the model's own type."""


KINDS = {
    "gated_delta_update": RecurrenceKind(("q", "k", "v", "a", "b"), 1, "state", gated_delta_tree, gated_delta_path),
    "ssm_update": RecurrenceKind(("hidden_states", "B", "C", "dt"), 1, "state", state_space_tree, two_forms=True),
    "recurrent_gla": RecurrenceKind(("q", "k", "v"), 2, "h", linear_attention_tree),
}
"""By the name in mlx-lm's modules."""


_ONE_DECAY = 3
"""Dimensions of gates with one number a head and token."""
_MANY = 16
"""Tokens of a prompt's chunk, from which blocks are faster than token by token."""


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
def reading() -> Generator[None]:
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

    def is_unrolled(self, tokens: int) -> bool:
        """A path of so many tokens takes the form for trees too: without a GPU mlx-lm goes token by token, or takes as
        long, and a path that is accepted in part would be computed again. With one, where mlx-lm takes another form
        for several tokens than for one, rounded otherwise."""
        return tokens > 1 and (self.kind.two_forms or mx.default_device() == mx.Device(mx.cpu))

    def over_prompt(self, arguments: Mapping[str, Any]) -> tuple[mx.array, mx.array]:
        """Over tokens that follow the state's: the function itself, or an equal one that is faster here."""
        path, gate = self.kind.over_path, arguments.get("a")
        tokens = arguments[self.kind.inputs[0]].shape[self.kind.axis]
        single = gate is not None and gate.ndim == _ONE_DECAY and arguments.get("mask") is None
        if path is None or not single or tokens < _MANY or not self.is_unrolled(tokens):
            return self.run(arguments)
        return path(arguments)

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
        held = _held(self)
        if name in held:
            return held[name]
        if "inner" not in held:
            raise AttributeError(name)
        return getattr(held["inner"], name)


def _held(module: Any) -> dict[str, Any]:
    """The parameters and submodules of a module by name: `nn.Module` is such a dictionary."""
    return module


def let_recurrences_record(model: nn.Module) -> None:
    """Wrap the recurrences and the short convolutions of this model's layers."""
    layers = modules_of(model)
    modules = {sys.modules[type(layer).__module__] for layer in layers}
    for module in modules:
        for name, kind in KINDS.items():
            inner: Any = vars(module).get(name)
            if inner is not None and not isinstance(inner, Recurrence):
                setattr(module, name, Recurrence(inner, kind))
    for layer in layers:
        if isinstance(layer, ShortConvolution):
            continue
        for name, part in list(_held(layer).items()):
            if isinstance(part, nn.Conv1d) and part.groups > 1:
                setattr(layer, name, ShortConvolution(part))
