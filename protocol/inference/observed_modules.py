"""Calls of a stock model's modules, observed from outside. Knows no model.

An observed module has a class of its own, a subclass whose call shows its result to an observer: attributes,
parameters and `isinstance` stay.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeGuard

import mlx.core as mx
from mlx import nn

Observer: TypeAlias = Callable[[nn.Module, tuple[Any, ...], Any], Any]
"""From a module, the arguments of a call and its result: the result from then on."""
Restore: TypeAlias = Callable[[], None]
"""Ends an observation."""


def observe(module: nn.Module, observer: Observer) -> Restore:
    """Observe a module that is not observed yet."""
    kind: Any = type(module)

    def call(self: Any, *arguments: Any, **others: Any) -> Any:
        result = kind.__call__(self, *arguments, **others)
        return observer(self, (*arguments, *others.values()), result)

    # Others look a layer's code up by the name of its module.
    module.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})

    def restore() -> None:
        module.__class__ = kind

    return restore


def modules_of(network: Any) -> list[nn.Module]:
    """All modules of a network, itself included."""
    return network.modules()


def state_of(result: Any) -> Any:
    """The hidden state of a layer's result: some layers return more beside it."""
    return result[0] if _is_tuple(result) else result


def _is_tuple(result: object) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(result, tuple)


@contextmanager
def observing(modules: Iterable[nn.Module], observer: Observer) -> Generator[None]:
    """Inside, these modules are observed; each is named once."""
    restores: list[Restore] = []
    try:
        for module in modules:
            restores.append(observe(module, observer))
        yield
    finally:
        for restore in restores:
            restore()


_STAGES = (18, 6, 2)


def stage(network: Any) -> Restore:
    """Dispatch what is built behind a few layers of this mlx-lm model, the first ones close together, in every forward
    until it is restored.

    Building the graph of 36 layers takes a millisecond or more, and the device would wait for all of it. The results
    are the same to the last bit: MLX fuses nothing across layers. On a processor it gains nothing: MLX's threads there
    are the ones that Python needs.
    """
    layers: list[nn.Module] = list(getattr(network, "layers", ()))
    staged = sorted({0, *(len(layers) // part for part in _STAGES)} if layers else ())
    restores = [observe(layers[index], _dispatch) for index in staged]

    def unstage() -> None:
        for restore in restores:
            restore()

    return unstage


def _dispatch(_: nn.Module, __: tuple[Any, ...], result: Any) -> Any:
    state = state_of(result)
    if isinstance(state, mx.array):
        # MLX's own annotations leave its arguments out.
        vars(mx)["async_eval"](state)
    return result
