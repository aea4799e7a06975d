"""An mlx-lm checkpoint as plain arrays and sizes, by Llama's names. Knows mlx-lm's models, not Core ML."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, load_model

from draft_worker.coreml.arrays import Half, Single
from draft_worker.coreml.conversion.architectures import Architecture, architecture_of, known
from draft_worker.coreml.conversion.layers import NotConvertible, Structure, read_structure
from draft_worker.coreml.package import DecoderShape
from draft_worker.coreml.rotation import Rotation, reorder
from draft_worker.head_tokens import HeadTokens, read_head_tokens
from protocol.errors import InputError

_ROTATED = ("q_proj", "k_proj", "q_norm", "k_norm")
"""Parameters whose rows are features of queries and keys."""


class Checkpoint:
    """A decoder of one of the known architectures; quantised weights are dequantised by `mx.dequantize`.

    `network`: a loaded mlx-lm model. `config`: the content of config.json; without one, what the model keeps of it.
    `head_tokens`: the tokens of the head if it has only some. Raises InputError for any other architecture, and for
    one in a form that can't be converted.
    """

    def __init__(
        self,
        network: Any,
        folder: Path = Path(),
        head_tokens: HeadTokens | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        # Models with pictures hold the decoder as their language model; the converter takes the decoder alone.
        network = getattr(network, "language_model", network)
        architecture = architecture_of(network)
        if architecture is None:
            raise _refusal(folder, f"its architecture is {type(network).__module__.split('.')[-1]}")
        self.folder = folder
        try:
            self._structure: Structure = read_structure(network, architecture, config or {})
        except NotConvertible as error:
            raise _refusal(folder, str(error)) from error
        self.shape: DecoderShape = self._structure.shape
        self.head_tokens = head_tokens
        self.reordered = self._structure.order != list(range(self.shape.head))
        """Whether the features of queries and keys are in another order than the model's."""
        parameters = dict(tree_flatten(dequantize_model(network).parameters()))
        self._arrays: dict[str, mx.array] = dict(_canonical(parameters, architecture, self.shape))

    @classmethod
    def load(cls, folder: Path) -> "Checkpoint":
        """The model in a folder of config.json and model*.safetensors; code in the folder is never run."""
        try:
            loaded: Any = load_model(folder, lazy=True, trust_remote_code=False)
        except FileNotFoundError as error:
            raise InputError(
                f"{folder} holds no model ({error}): pass a folder with config.json and model*.safetensors."
            ) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200].rstrip(".")
            raise InputError(f"The model in {folder} can't be loaded ({reason}): download it again.") from error
        network, config = loaded
        vocabulary = getattr(network, "language_model", network).args.vocab_size
        return cls(network, folder, read_head_tokens(folder, vocabulary), config)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def half(self, name: str) -> Half:
        """A parameter by Llama's name, rounded to fp16. Raises InputError for numbers beyond fp16's range."""
        with np.errstate(over="ignore"):
            array = np.array(self._arrays[name].astype(mx.float32)).astype(np.float16)
        if not np.isfinite(array).all():
            raise InputError(
                f"{name} of {self.folder} has numbers beyond fp16's range, the Neural Engine's only type: "
                "use the MLX draft engine for this model."
            )
        if self.reordered and name.split(".")[-2] in _ROTATED:
            return reorder(array, self._structure.order)
        return array

    def head(self) -> tuple[str, Half]:
        """The name of the head's parameter, and its rows in the order of the logits."""
        name = "lm_head.weight" if "lm_head.weight" in self else "model.embed_tokens.weight"
        rows = self.half(name)
        return name, rows if self.head_tokens is None else rows[self.head_tokens]

    @property
    def head_rows(self) -> int:
        return self.shape.vocabulary if self.head_tokens is None else len(self.head_tokens)

    def rotations(self, context: int) -> list[Rotation]:
        """What each of mlx-lm's different ropes applies at the positions below `context`."""
        return [Rotation.measure(rope, self._structure.order, context) for rope in self._structure.ropes]

    def position_scale(self, context: int) -> Single | None:
        """The factors of the queries at the positions below `context`; None if all are 1."""
        scale = self._structure.position_scale(context)
        return None if scale is None or (scale == 1).all() else scale

    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) over every parameter's name and fp16 bytes, the rotations and the head's tokens."""
        digest = hashlib.sha256()
        for name, array in self._halves():
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(array).data)
        for rotation in self.rotations(min(self.shape.positions, 64)):
            for table in rotation:
                digest.update(table.data)
        if self.head_tokens is not None:
            digest.update(self.head_tokens.data)
        return digest.hexdigest()

    def _halves(self) -> Iterator[tuple[str, Half]]:
        for name in sorted(self._arrays):
            yield name, self.half(name)


def _canonical(
    parameters: Mapping[str, mx.array], architecture: Architecture, shape: DecoderShape
) -> Iterator[tuple[str, mx.array]]:
    """The parameters by Llama's names: renamed, fused matrices divided, and norms with their offset."""
    for given, array in parameters.items():
        *path, part, kind = [architecture.names.get(component, component) for component in given.split(".")]
        if part.endswith("norm"):
            array = array.astype(mx.float32) + architecture.norm_offset
        names = architecture.fused.get(part, (part,))
        for name, rows in zip(names, _divided(array, names, shape), strict=True):
            yield ".".join([*path, name, kind]), rows


def _divided(array: mx.array, names: tuple[str, ...], shape: DecoderShape) -> Iterator[mx.array]:
    """The rows of each of `names`, in this order."""
    if names == ("q_proj", "k_proj", "v_proj"):
        sizes = [shape.head * heads for heads in (shape.heads, shape.key_heads, shape.key_heads)]
    else:
        sizes = [len(array) // len(names)] * len(names)
    begin = 0
    for size in sizes:
        yield array[begin : begin + size]
        begin += size


def _refusal(folder: Path, reason: str) -> InputError:
    return InputError(
        f"The model in {folder} can't be converted ({reason}): "
        f"choose one of the architectures {known()}, or use the MLX draft engine."
    )
