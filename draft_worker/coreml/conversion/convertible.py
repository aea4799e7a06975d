"""A model to be converted: plain arrays by Llama's names, sizes, ropes. Knows no files and no network."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np

from draft_worker.coreml.arrays import Half, Single
from draft_worker.coreml.conditioning import Conditioning
from draft_worker.coreml.conversion.layers import Structure
from draft_worker.coreml.package import DecoderShape
from draft_worker.coreml.rotation import Rotation, reorder
from draft_worker.short_head import HeadTokens
from protocol.errors import InputError

_ROTATED = ("q_proj", "k_proj", "q_norm", "k_norm")
"""Parameters whose rows are features of queries and keys."""


class Convertible:
    """What a conversion needs of a model, wherever it comes from."""

    def __init__(
        self,
        folder: Path,
        structure: Structure,
        arrays: Mapping[str, mx.array],
        head_tokens: HeadTokens | None = None,
        conditioning: Conditioning | None = None,
    ) -> None:
        """`arrays`: parameters by Llama's names. `head_tokens`: the tokens of the head if it has only some.
        `conditioning`: of a trained drafter."""
        self.folder = folder
        self.shape: DecoderShape = structure.shape
        self.head_tokens = head_tokens
        self.conditioning = conditioning
        self.reordered = structure.order != list(range(structure.shape.head))
        """Whether the features of queries and keys are in another order than the model's."""
        self._structure = structure
        self._arrays = arrays

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
        whole = self.head_tokens is None or len(rows) == len(self.head_tokens)
        return name, rows if whole else rows[self.head_tokens]

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
        for name in sorted(self._arrays):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(self.half(name)).data)
        for rotation in self.rotations(min(self.shape.positions, 64)):
            for table in rotation:
                digest.update(table.data)
        if self.head_tokens is not None:
            digest.update(self.head_tokens.data)
        return digest.hexdigest()
