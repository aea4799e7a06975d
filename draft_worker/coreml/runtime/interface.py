"""The interface of a runtime, which runs converted models. Imports no runtime."""

from collections.abc import Mapping
from typing import Protocol

from draft_worker.coreml.arrays import Array


class Runtime(Protocol):
    """A loaded converted model, ready for calls of each function."""

    name: str
    device: str
    """A description of the device for the user."""

    def load(self, function: str) -> None:
        """Load the function, unless it is loaded. May take minutes, when the device compiles it."""
        ...

    def predict(self, function: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Call the function. The runtime may read `inputs` until it ends: the caller reuses its arrays."""
        ...
