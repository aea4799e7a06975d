"""MLX on the processor instead of the GPU."""

import sys

import mlx.core as mx

from protocol.inference.device.wired_memory import BESIDE_TARGET, bound_freed_buffers


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
