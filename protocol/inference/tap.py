"""Records outputs of a stock mlx-lm model's layers in the same forward. Knows no sequence."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from protocol.inference.device import compute
from protocol.inference.layer_cache import ELEMENT_TYPES
from protocol.inference.observed_modules import Restore, modules_of, observe, observing, state_of
from protocol.kv.arena_header import ElementType
from protocol.messages.features import FINAL, MAX_WIDTH, Taps

_TOKENS = ((0, 1, 2), (3, 4, 5))
"""Of the two forwards of the proof."""
_TOLERANCE = 1e-2
"""Largest deviation, relative or absolute, of logits that are computed twice from the same state."""


class Recorded(NamedTuple):
    """What a forward's tokens left."""

    outputs: tuple[int, ...]
    rows: mx.array
    """(L, outputs * width), not yet computed; bfloat16 as its bits, uint16."""

    @property
    def numbers(self) -> NDArray[np.float32]:
        """The same, computed."""
        rows: Any = self.rows.view(mx.bfloat16) if self.rows.dtype == mx.uint16 else self.rows
        found: NDArray[np.float32] = np.array(rows.astype(mx.float32))
        return found

    def part(self, begin: int, end: int | None = None) -> "Recorded":
        """That of some of the tokens."""
        return Recorded(self.outputs, self.rows[begin:end])


class LayerTap:
    """Records one model's forwards. While it records nothing, the model is as it was."""

    def __init__(self, layers: Sequence[nn.Module], norm: nn.Module, width: int, element: ElementType) -> None:
        """See `proved_tap`."""
        self.taps = Taps(len(layers), width)
        self.element = element
        """Of the recorded rows."""
        self.outputs: tuple[int, ...] = ()
        self._modules = {FINAL: norm, **dict(enumerate(layers))}
        self._restores: list[Restore] = []
        self._found: dict[int, mx.array] = {}

    def record(self, outputs: tuple[int, ...]) -> None:
        """Record these outputs from the next forward on; nothing if there are none."""
        for restore in self._restores:
            restore()
        self.outputs, self._found = outputs, {}
        self._restores = [observe(self._modules[output], partial(self._keep, output)) for output in outputs]

    def take(self) -> Recorded | None:
        """What the last forward's tokens left; None if nothing is recorded."""
        if not self._found:
            return None
        states = [self._found[output].squeeze(0) for output in self.outputs]
        self._found = {}
        if self.element is ElementType.FLOAT32:
            states = [state.astype(mx.float32) for state in states]
        rows = mx.concatenate(states, axis=-1)
        return Recorded(self.outputs, rows.view(mx.uint16) if self.element is ElementType.BFLOAT16 else rows)

    def _keep(self, output: int, _: nn.Module, __: tuple[Any, ...], result: Any) -> Any:
        self._found[output] = state_of(result)
        return result


def proved_tap(network: Any) -> LayerTap | None:
    """A tap for this model; None if what it would record can't be shown to be the residual stream.

    Every layer must be called once in a forward, with the result of the layer before it. The final norm is the module
    that is called with the last layer's result. In a forward over other tokens, the norm's result is replaced by that
    of the recorded last state: this must give the logits of the tokens that the state was recorded of.
    """
    try:
        return _proved(network)
    except (TypeError, ValueError, AttributeError, LookupError):
        return None


class _Call(NamedTuple):
    """One call of a module; calls are listed as they end."""

    module: nn.Module
    arguments: tuple[Any, ...]
    state: Any
    """An array, of a module that returns states."""

    def takes(self, state: mx.array) -> bool:
        return any(argument is state for argument in self.arguments)


def _proved(network: Any) -> LayerTap | None:
    layers: list[nn.Module] = list(network.layers)
    calls, logits = _traced(network, layers)
    places = [place for place, call in enumerate(calls) if any(call.module is layer for layer in layers)]
    stream = [calls[place] for place in places]
    norm = next((call for call in calls[places[-1] + 1 :] if call.takes(stream[-1].state)), None)
    if norm is None or not _is_chain(stream, layers):
        return None
    states = [call.state for call in (*stream, norm)]
    width, elements = states[0].shape[-1], {state.dtype for state in states}
    if any(state.shape != (1, len(_TOKENS[0]), width) for state in states) or width > MAX_WIDTH:
        return None
    if not elements <= set(ELEMENT_TYPES):
        return None
    final = _result(norm.module, stream[-1].state)
    with observing([norm.module], lambda _module, _arguments, _result: final):
        again = _logits(network, _TOKENS[1])
    if not mx.allclose(again, logits, _TOLERANCE, _TOLERANCE).item():
        return None
    element = ELEMENT_TYPES[elements.pop()] if len(elements) == 1 else ElementType.FLOAT32
    return LayerTap(layers, norm.module, width, element)


def _traced(network: Any, layers: Sequence[nn.Module]) -> tuple[list[_Call], mx.array]:
    """The calls of the layers, and of all modules that are in none of them; the logits."""
    calls: list[_Call] = []

    def see(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> Any:
        calls.append(_Call(module, arguments, state_of(result)))
        return result

    inside = {id(module) for layer in layers for module in modules_of(layer)}
    outside = {
        id(module): module for module in modules_of(network) if module is not network and id(module) not in inside
    }
    with observing([*{id(layer): layer for layer in layers}.values(), *outside.values()], see):
        logits = _logits(network, _TOKENS[0])
    compute([call.state for call in calls if isinstance(call.state, mx.array)])
    return calls, logits


def _is_chain(stream: Sequence[_Call], layers: Sequence[nn.Module]) -> bool:
    """Whether each layer is called once, in order, with the result of the one before it."""
    in_order = len(stream) == len(layers) and all(
        call.module is layer for call, layer in zip(stream, layers, strict=True)
    )
    return in_order and all(call.takes(before.state) for before, call in pairwise(stream))


def _logits(network: Any, tokens: Sequence[int]) -> mx.array:
    logits = network(mx.array([list(tokens)]), cache=make_prompt_cache(network))
    # One forward after the other: ranks that share a model must run them in the same order.
    compute(logits)
    return logits


def _result(module: Any, state: mx.array) -> Any:
    return module(state)
