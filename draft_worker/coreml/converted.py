"""A converted model's folder, checked at load. Knows no engine and no runtime."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from draft_worker.coreml.package import HOST, MODEL, Half, Package, Single, rotation_tables
from draft_worker.coreml.program_file import ProgramFile
from draft_worker.short_head import HeadTokens, are_head_tokens
from protocol.contracts.tokenizer_fingerprint import tokenizer_fingerprint, vocabulary_fingerprint
from protocol.errors import InputError


class Rotation(NamedTuple):
    """Rotary positions as two tables of shape (positions, head / 2), measured on mlx-lm's rope, so that every scaling
    that mlx-lm supports is the same.

    Rope rotates pairs (a, b) of a head's features by an angle that grows with the position, and may scale them: (a, b)
    becomes m (a cos - b sin, a sin + b cos). For a = 1 and b = 0 the result is (m cos, m sin). Which features form a
    pair differs between models. In a package, pair i is features i and i + head / 2.
    """

    cosine: Single
    sine: Single

    @classmethod
    def measure(cls, rope: Any, order: Sequence[int], positions: int) -> "Rotation":
        """`rope`: the rope of an mlx-lm attention, called on (1, 1, positions, head) float32. `order`: `pair_order`."""
        half = len(order) // 2
        probe = np.zeros((1, 1, positions, len(order)), np.float32)
        probe[..., order[:half]] = 1
        rotated = np.array(rope(mx.array(probe)))[0, 0]
        return cls(np.ascontiguousarray(rotated[:, order[:half]]), np.ascontiguousarray(rotated[:, order[half:]]))


class HostTables(NamedTuple):
    """The tables from which the host computes the inputs of each token."""

    embedding: Half
    """(vocabulary, hidden)."""
    rotations: list[Rotation]
    """Of `context` positions, by `Layer.rotation`."""
    position_scale: Single | None = None
    """(context,) factors of the queries; None: all are 1."""
    head_tokens: HeadTokens | None = None
    """The tokens of the logits; None: the whole vocabulary."""


class Converted(NamedTuple):
    """The contents of a folder that `launch-pipeline convert` made."""

    folder: Path
    package: Package
    file: ProgramFile
    tables: HostTables

    @classmethod
    def open(cls, folder: Path) -> "Converted":
        """Raises InputError for a folder that is incomplete, damaged, or mixed from several models."""
        if not (folder / MODEL).is_dir():
            raise InputError(
                f"{folder} holds no {MODEL}: make one with `launch-pipeline convert MODEL --out {folder}`."
            )
        file = ProgramFile(folder / MODEL)
        package = Package.decode(file.metadata, file.path)
        require_functions(file, package)
        file.check_weights()
        if package.tokenizer and tokenizer_fingerprint(folder) != package.tokenizer:
            raise InputError(f"The tokenizer in {folder} does not match the package: convert the model again.")
        return cls(folder, package, file, _tables(folder / HOST, package))

    def vocabulary_fingerprint(self) -> str:
        """Of the tokenizer beside the package; empty if it was converted without one."""
        return vocabulary_fingerprint(self.folder) if self.package.tokenizer else ""


def require_functions(file: ProgramFile, package: Package) -> None:
    """Raises InputError unless `file` has the functions that `package` describes."""
    for name, shapes in package.functions.items():
        function = file.functions.get(name)
        if function is None:
            raise file.damage(f"it lacks the function {name}")
        found = {input: tensor.shape for input, tensor in function.inputs.items()}
        if found != shapes:
            raise file.damage(f"{function.name} takes other inputs than the package states")


def _tables(path: Path, package: Package) -> HostTables:
    shape = package.shape
    names = [rotation_tables(index) for index in package.rotations]
    expected: dict[str, tuple[int, ...]] = {"embedding": (shape.vocabulary, shape.hidden)}
    for pair in names:
        expected |= dict.fromkeys(pair, (package.context, shape.head // 2))
    if package.position_scale:
        expected["position_scale"] = (package.context,)
    if package.head_rows < shape.vocabulary:
        expected["head_tokens"] = (package.head_rows,)
    try:
        loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
        arrays, metadata = loaded
        tables = {name: np.array(arrays[name]) for name in expected}
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise InputError(f"{path} is missing or damaged: convert the model again.") from error
    head = tables.get("head_tokens")
    fits = metadata.get("model") == package.model and {name: table.shape for name, table in tables.items()} == expected
    if not fits or (head is not None and not are_head_tokens(head, shape.vocabulary)):
        raise InputError(f"{path} belongs to another model than {MODEL}: convert the model again.")
    rotations = [Rotation(tables[cosine], tables[sine]) for cosine, sine in names]
    return HostTables(tables["embedding"], rotations, tables.get("position_scale"), head)
