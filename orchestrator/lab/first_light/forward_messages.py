"""Arguments and reports of a process that compares and times a target's forwards by width and context. Plain types."""

from typing import Literal, TypeAlias

import msgspec

Precision: TypeAlias = Literal["stored", "float32"]
"""stored: as the model's files and this machine's device have it; float32: every weight unpacked to 32 bits."""
Shape: TypeAlias = Literal["chain", "tree"]
"""tree: the chain, with one more leaf beside its first token, so that attention has a mask."""


class ForwardOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last argument of the process, in JSON."""

    folder: str
    """Of the model."""
    precision: Precision = "stored"
    tokens: tuple[int, ...] = ()
    """A text, whose logits are compared."""
    prompt: int = 64
    """Its first tokens are read as a prompt."""
    compared: tuple[int, ...] = ()
    """Widths whose logits are compared with those of width 1."""
    timed: tuple[int, ...] = ()
    """Widths whose time is measured."""
    contexts: tuple[int, ...] = ()
    """Tokens in front of a timed forward."""
    samples: int = 8
    """Forwards of each width and context; their median counts."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded", forbid_unknown_fields=True):
    """The model is ready."""

    device: str
    """GPU or processor."""
    activations: str
    """Element type of the logits."""


class Compared(msgspec.Struct, frozen=True, tag="compared", forbid_unknown_fields=True):
    """The logits of one width against those of width 1, at the same positions of the same text."""

    width: int
    shape: Shape
    positions: int
    difference: float
    """The largest, in standard deviations of a position's logits."""
    flips: int
    """Positions with another most probable token."""
    gap: float | None
    """The largest gap between the two most probable tokens, by width 1, at such a position, in standard deviations;
    None without flips."""


class Timed(msgspec.Struct, frozen=True, tag="timed", forbid_unknown_fields=True):
    """The median time of a forward, its result included."""

    width: int
    context: int
    milliseconds: float


ForwardReport: TypeAlias = Loaded | Compared | Timed
"""One JSON object a line of the process's standard output."""
