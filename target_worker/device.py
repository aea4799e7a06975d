"""The device that MLX computes on: its name, and wiring of the weights in its memory."""

import mlx.core as mx

_HEADROOM = 4 << 30
"""Bytes wired beyond the weights, for KV. More would leave too little memory to the rest of the machine."""
_FREED_BUFFERS = 1 << 30
"""Bytes of freed buffers that MLX may keep for reuse."""


def device() -> str:
    """The device's kind and, where MLX knows it, its name."""
    name = str(mx.device_info().get("device_name", "")).strip()
    kind = "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"
    return f"{kind} ({name})" if name else kind


def wire() -> None:
    """Keep the loaded weights resident on Apple GPUs, where macOS would otherwise page them out between rounds."""
    if not mx.metal.is_available():
        return
    recommended = int(mx.device_info()["max_recommended_working_set_size"])
    mx.set_wired_limit(min(recommended, mx.get_active_memory() + _HEADROOM))
    mx.set_cache_limit(_FREED_BUFFERS)
