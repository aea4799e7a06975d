"""Arguments and reports of a process that converts a model for Core ML. Plain types; knows no Core ML."""

from typing import Literal, TypeAlias

import msgspec

from protocol.child_process import Failed

FOLDER_MODEL = "model.mlpackage"
"""A folder with this package is a converted model."""
FOLDER_FACTS = "package.json"
"""Facts about the package, for processes that can't read packages."""
FORMAT = 6
"""Of a converted model's folder; a folder of another format is converted again."""

WeightKind: TypeAlias = Literal["fp16", "int8", "4bit"]
"""Unchanged; with one scale per output channel; with a palette of sixteen numbers per output channel."""


class Choices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user may choose about a conversion."""

    widths: tuple[int, ...] = (1, 8, 32)
    """Tokens that one call evaluates; each width is a function of its own."""
    context: int | None = None
    """KV slots; None for 2048, or for the model's context if that is less."""
    weights: WeightKind = "fp16"


class ConversionOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one JSON argument of `python -m draft_worker.coreml.conversion`."""

    source: str
    destination: str
    choices: Choices


class FactsLayer(msgspec.Struct, frozen=True):
    """The part of a package's layer that says what it keeps of a token."""

    convolution: bool = False
    """It keeps its input; another layer keeps a key and a value."""


class FactsShape(msgspec.Struct, frozen=True):
    """The part of a package's shape that says how large its cache is."""

    layers: tuple[FactsLayer, ...]
    heads: int
    key_heads: int
    head: int
    """Elements of a head."""


class Facts(msgspec.Struct, frozen=True):
    """The part of FOLDER_FACTS that a process needs to start a draft."""

    source: str
    """Folder or id of the model that was converted."""
    widths: tuple[int, ...] = ()
    """Each has a function of its own."""
    context: int = 0
    """KV slots."""
    shape: FactsShape | None = None
    format: int = FORMAT


class Progress(msgspec.Struct, frozen=True, tag="progress", forbid_unknown_fields=True):
    """`done` of `total` steps are done; `stage` names the step that begins."""

    stage: str
    done: int
    total: int


class LintFinding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One violation of a rule of the Neural Engine."""

    severity: Literal["error", "warning"]
    """error: runs off the Neural Engine, or Core ML refuses it; warning: slower, or only some systems accept it."""
    rule: str
    function: str
    """Empty for the whole package."""
    where: str
    """An operation, value or file."""
    reason: str


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished", forbid_unknown_fields=True):
    """The end of a conversion that succeeded."""

    folder: str
    package_bytes: int
    host_bytes: int
    """Embedding and rotations, which stay with the host."""
    context: int
    operations: dict[str, dict[str, int]]
    """By function: how often each kind of operation runs in a call."""
    findings: tuple[LintFinding, ...]
    seconds: float


ConversionReport: TypeAlias = Progress | Finished | Failed
"""One JSON object a line of the process's standard output."""
