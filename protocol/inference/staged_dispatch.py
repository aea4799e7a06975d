"""Gives the device the first layers' work while Python still builds the rest of a forward. Knows no sequence.

Building the graph of 36 layers takes a millisecond or more, and without this the device waits for all of it. The
results are the same to the last bit: MLX fuses nothing across layers. On a processor it gains nothing: MLX's threads
there are the ones that Python needs.
"""

from typing import Any

import mlx.core as mx
from mlx import nn

from protocol.inference.observed_modules import observe, state_of

_PARTS = (18, 6, 2)


def stage(network: Any) -> None:
    """Dispatch what is built behind a few layers of this mlx-lm model, the first ones close together: from now on, in
    every forward."""
    layers: list[nn.Module] = list(getattr(network, "layers", ()))
    for index in sorted({0, *(len(layers) // part for part in _PARTS)} if layers else ()):
        observe(layers[index], _dispatch)


def _dispatch(_: nn.Module, __: tuple[Any, ...], result: Any) -> Any:
    state = state_of(result)
    if isinstance(state, mx.array):
        # MLX's own annotations leave its arguments out.
        vars(mx)["async_eval"](state)
    return result
