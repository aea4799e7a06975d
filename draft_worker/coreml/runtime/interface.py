"""What runs a converted model: the interface. Imports no runtime."""

from collections.abc import Mapping
from typing import Protocol

from draft_worker.coreml.arrays import Array


class DeviceState(Protocol):
    """A cache that the runtime holds between calls."""

    def read(self) -> Array:
        """All of it, in `Package.cache_shape`; slow."""
        ...

    def write(self, cache: Array) -> None: ...


class Runtime(Protocol):
    """A converted model that is loaded, ready for calls of each of its widths."""

    name: str
    device: str
    """Where it computes, for people to read."""

    def predict(self, width: int, inputs: Mapping[str, Array], state: DeviceState | None = None) -> dict[str, Array]:
        """One call of the function for `width`. Inputs may be read until the runtime ends: keep them."""
        ...

    def make_state(self) -> DeviceState:
        """An empty cache, for a package that leaves its cache to the runtime."""
        ...
