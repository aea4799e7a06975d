"""The files and the metadata of a converted model's folder, and names of array types. Knows no weights and no graph."""

import math
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.contracts.coreml import FOLDER_MODEL, FORMAT, Facts, WeightKind
from protocol.errors import InputError

Array: TypeAlias = npt.NDArray[Any]
Half: TypeAlias = npt.NDArray[np.float16]
Single: TypeAlias = npt.NDArray[np.float32]
Slots: TypeAlias = npt.NDArray[np.intp]
"""Slots of a cache, or a number for each slot."""
MODEL = FOLDER_MODEL
HOST = "host.safetensors"
METADATA_KEY = "launch_pipeline"

Activation: TypeAlias = Literal["silu", "gelu"]
"""Of the MLP's gate; gelu in its approximation by tanh."""


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The kind of one layer."""

    rotation: int | None = 0
    """Which of the model's rotations turns its queries and keys; None: they carry no position."""
    sliding: bool = False
    """Whether a token sees only the last tokens of its path, as many as the window."""
    convolution: bool = False
    """Whether it has a short convolution instead of attention."""


class DecoderShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes of a decoder that its graph and its host need."""

    architecture: str
    layers: tuple[Layer, ...]
    hidden: int
    heads: int
    key_heads: int
    """Key heads, and as many value heads; heads / key_heads query heads share one."""
    head: int
    """Size of one head."""
    vocabulary: int
    positions: int
    """Most positions that the model was trained for."""
    epsilon: float
    """Of the RMS norms."""
    score_scale: float
    """Factor of the product of a query and a key."""
    window: int | None = None
    """Tokens that a token sees in a sliding layer, itself included."""
    taps: int = 0
    """Tokens of its path that a token sees in a short convolution, itself included."""
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    score_cap: float | None = None
    """Attention scores s become cap tanh(s / cap)."""
    logit_cap: float | None = None
    """The same for the logits."""
    clips: bool = False
    """Whether sums of the residual stream beyond fp16's range are set to its largest number."""

    @property
    def attentions(self) -> int:
        """Layers with attention."""
        return sum(not layer.convolution for layer in self.layers)

    @property
    def convolutions(self) -> int:
        """Layers with a short convolution."""
        return len(self.layers) - self.attentions

    @property
    def sharing(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.key_heads


class Package(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The metadata inside a package."""

    source: str
    """Folder or id of the converted model."""
    shape: DecoderShape
    widths: tuple[int, ...]
    """Tokens of one call, ascending. Each width has its own function."""
    context: int
    """KV slots."""
    weights: WeightKind
    outputs: tuple[int, ...]
    """Rows of the head in each of the outputs logits_0, logits_1, ... If there are fewer rows than tokens, the host's
    file names their tokens."""
    model: str
    """`Checkpoint.fingerprint` of the parameters; the host's file states it too."""
    tokenizer: str
    """Fingerprint of the tokenizer; empty if the source has none."""
    position_scale: bool = False
    """Whether queries are multiplied by a factor of their position, which the host's file has."""
    version: str = ""
    """Version of launch-pipeline that made the package."""
    format: int = FORMAT

    @property
    def head_rows(self) -> int:
        """The length of a token's logits."""
        return sum(self.outputs)

    def function(self, width: int) -> str:
        """Name of the function for `width`."""
        return f"width_{width}"

    @property
    def functions(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """All functions by name, with the shapes of all their inputs."""
        return {self.function(width): self.input_shapes(width) | {"kv": self.cache_shape} for width in self.widths}

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        """The shape of `kv`, (2 layers, key heads, slots, head): keys of every layer with attention, then values."""
        return (2 * self.shape.attentions, self.shape.key_heads, self.context, self.shape.head)

    @property
    def host_shape(self) -> tuple[int, int, int, int]:
        """The shape of a sequence's cache on the host: `kv`, then the inputs of the short convolutions.

        A convolution's input has `hidden` numbers, which fill heads / key_heads rows of `kv`.
        """
        return (self.cache_shape[0] + self.shape.sharing * self.shape.convolutions, *self.cache_shape[1:])

    @property
    def facts(self) -> Facts:
        size = math.prod(self.host_shape) * np.dtype(np.float32).itemsize
        return Facts(source=self.source, widths=self.widths, cache_bytes=size)

    @property
    def masks(self) -> dict[str, int | None]:
        """The mask inputs, each with its window. A window that the context fits in is no window."""
        windows = [self._window(layer) for layer in self.shape.layers if not layer.convolution]
        return {_mask(window): window for window in windows}

    def mask_of(self, layer: Layer) -> str:
        """The name of a layer's mask."""
        return _mask(self._window(layer))

    @property
    def rotations(self) -> list[int]:
        """The rotations that some layer uses."""
        return sorted({layer.rotation for layer in self.shape.layers if layer.rotation is not None})

    def input_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """Inputs of the function for `width`, without the cache `kv`."""
        shape = self.shape
        inputs: dict[str, tuple[int, ...]] = {"x": (1, shape.hidden, 1, width)}
        for index in self.rotations:
            inputs |= dict.fromkeys(rotation_inputs(index), (1, 1, shape.head, width))
        inputs |= dict.fromkeys(self.masks, (1, 1, width, self.context + width))
        if self.position_scale:
            inputs["position_scale"] = (1, 1, 1, width)
        if shape.convolutions:
            inputs["past"] = (shape.convolutions, shape.taps - 1, shape.hidden, width)
            inputs["ancestors"] = (1, shape.taps - 1, width, width)
        return inputs

    def _window(self, layer: Layer) -> int | None:
        window = self.shape.window if layer.sliding else None
        return None if window is None or window >= self.context else window

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, metadata: dict[str, str], path: Path) -> "Package":
        """The package at `path`, from its user-defined metadata.

        Raises InputError unless this version of launch-pipeline can read the metadata.
        """
        try:
            package = msgspec.json.decode(metadata[METADATA_KEY], type=cls)
        except KeyError as error:
            raise InputError(
                f"{path} was not made by launch-pipeline: convert its model with `launch-pipeline convert`."
            ) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(
                f"{path} has metadata that this version can't read ({error}): convert its model again."
            ) from error
        if package.format != FORMAT or not package.widths or min(package.widths) < 1 or package.context < 1:
            raise InputError(f"{path} has another version's format: convert its model again.")
        return package


def rotation_inputs(index: int) -> tuple[str, str]:
    """The names of the two inputs of a rotation."""
    return ("cos", "sin") if index == 0 else (f"cos_{index}", f"sin_{index}")


def rotation_tables(index: int) -> tuple[str, str]:
    """The names of a rotation's two tables in the host's file."""
    return ("cosine", "sine") if index == 0 else (f"cosine_{index}", f"sine_{index}")


def _mask(window: int | None) -> str:
    return "mask" if window is None else "window_mask"
