"""The name of the device that MLX computes on."""

import mlx.core as mx


def device() -> str:
    """The device's kind and, where MLX knows it, its name."""
    name = str(mx.device_info().get("device_name", "")).strip()
    kind = "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"
    return f"{kind} ({name})" if name else kind
