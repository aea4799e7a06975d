"""MLX's device of a process: the processor, or Apple's GPU and how much memory stays resident there.

macOS would otherwise page that memory out. The processes of a pipeline share the working set that macOS recommends for
the GPU. Wiring more than that slows down the whole machine, or ends processes.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

compute: Callable[..., None] = vars(mx)["eval"]
"""`mx.eval`, whose arguments MLX's own annotations leave out: arrays, or lists and dictionaries of arrays."""


class Reserve(NamedTuple):
    """Bytes that a process may use beyond its weights."""

    headroom: int
    """Wired beyond the weights, for KV. More would leave too little memory to the rest of the machine."""
    freed: int
    """Freed buffers that MLX may keep for reuse."""


TARGET = Reserve(headroom=4 << 30, freed=1 << 30)
BESIDE_TARGET = Reserve(headroom=1 << 30, freed=256 << 20)
"""A draft keeps fewer tokens than the target, and a prefill worker one prompt."""


def wire(share: float, reserve: Reserve) -> None:
    """Wire the loaded weights, and bound MLX's freed buffers. Does nothing without an Apple GPU.

    `share`: of the recommended working set, that this process may wire.
    """
    if not mx.metal.is_available():
        return
    recommended = int(mx.device_info()["max_recommended_working_set_size"])
    mx.set_wired_limit(wired_limit(recommended, mx.get_active_memory(), share, reserve.headroom))
    bound_freed_buffers(reserve)


def bound_freed_buffers(reserve: Reserve) -> None:
    """On a Mac, MLX otherwise keeps freed buffers up to the machine's memory, also for work on the processor."""
    if mx.metal.is_available():
        mx.set_cache_limit(reserve.freed)


def wired_limit(recommended: int, weights: int, share: float, headroom: int) -> int:
    """Bytes to wire. Limits whose shares sum to 1 sum to at most `recommended`."""
    return min(weights + headroom, int(share * recommended))


def compute_on_processor() -> None:
    """Leave the GPU to others: from now on this process computes on the processor."""
    mx.set_default_device(mx.cpu)
    bound_freed_buffers(BESIDE_TARGET)
    spare_compiler()


def spare_compiler() -> None:
    """Compile nothing from now on, on macOS, for a process that computes on the processor.

    There `mx.compile` calls the C++ compiler at run time (MLX, mlx/backend/cpu/compiled.cpp). A Mac without one offers
    to install the developer tools, in a window. mlx-lm's activations are such functions. On Linux they stay compiled,
    which saves 1 to 4% of a forward's processor time.
    """
    if sys.platform == "darwin":
        mx.disable_compile()
