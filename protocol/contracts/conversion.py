"""What a process that converts a model for Core ML is told, and what it says. Plain types; knows no Core ML."""

from typing import Literal, TypeAlias

import msgspec

FOLDER_MODEL = "model.mlpackage"
"""What makes a folder a converted model."""
FOLDER_FACTS = "package.json"
"""Says in a converted folder what the package says of itself, for who can't read packages."""
FORMAT = 2
"""Of a converted model's folder; another one is converted again."""

WeightKind: TypeAlias = Literal["fp16", "int8", "4bit"]
"""As they are; with one scale an output channel; with a palette of sixteen numbers an output channel."""
CacheKind: TypeAlias = Literal["io", "state"]
"""Who holds the KV: the host, passing it in and out, or Core ML, as the model's state."""


class Choices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user may choose about a conversion."""

    widths: tuple[int, ...] = (1, 8, 32)
    """Tokens that one call evaluates; a function each."""
    context: int | None = None
    """KV slots; None for 2048, or what the model knows if that is less."""
    weights: WeightKind = "fp16"
    cache: CacheKind = "io"


class ConversionOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one JSON argument of `python -m draft_worker.coreml.conversion`."""

    source: str
    destination: str
    choices: Choices


class Facts(msgspec.Struct, frozen=True):
    """Of what FOLDER_FACTS says, what a process that starts a draft has to know."""

    source: str
    """Folder or id of the model that was converted."""
    format: int = FORMAT


class Progress(msgspec.Struct, frozen=True, tag="progress", forbid_unknown_fields=True):
    """`done` of `total` steps; `stage` names the one that now begins."""

    stage: str
    done: int
    total: int


class LintFinding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One breach of one rule of the Neural Engine."""

    severity: Literal["error", "warning"]
    """error: it leaves the Neural Engine, or Core ML refuses it; warning: it costs, or only some systems take it."""
    rule: str
    function: str
    """Empty where the whole package is meant."""
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


class Failed(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    """The end of one that did not, in a sentence for the user."""

    text: str
    asked_wrong: bool
    """Whether what was asked for is the cause, rather than the machine."""


ConversionReport: TypeAlias = Progress | Finished | Failed
"""One JSON object a line of the process's standard output."""
