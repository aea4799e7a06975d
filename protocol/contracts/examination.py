"""What a process that examines a converted model on its device is told, and what it says. Plain types.

Each stage is a process of its own: a device's compiler or driver may crash or hang whoever calls it.
"""

from typing import Literal, TypeAlias

import msgspec

Stage: TypeAlias = Literal["golden", "predict", "plan"]
"""The executor's answers to a file; the device's answers, many times; where the device would run what."""
RuntimeName: TypeAlias = Literal["coreml", "executor"]
Units: TypeAlias = Literal["CPU_AND_NE", "CPU_ONLY"]


class ExaminationOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last argument of the process, in JSON."""

    folder: str
    """Of the converted model."""
    stage: Stage
    golden: str
    """File of the executor's answers: written by the golden stage, read by the predict stage."""
    runtime: RuntimeName = "coreml"
    units: Units = "CPU_AND_NE"
    predicts: int = 300


class Agreed(msgspec.Struct, frozen=True, tag="agreed", forbid_unknown_fields=True):
    """How the device's logits compare with the executor's."""

    width: int
    deviation: float | None
    """Root mean square of the difference, in standard deviations of the executor's logits; None if the device's
    are not even numbers."""
    same: float
    """Share of tokens with the same favourite."""


class Predicted(msgspec.Struct, frozen=True, tag="predicted", forbid_unknown_fields=True):
    """So many predicts of the order's number are done."""

    done: int
    steady: bool
    """All of them gave the same logits as the first of their width."""


class Timed(msgspec.Struct, frozen=True, tag="timed", forbid_unknown_fields=True):
    """The median time of a predict."""

    width: int
    milliseconds: float


class Placed(msgspec.Struct, frozen=True, tag="placed", forbid_unknown_fields=True):
    """Where Core ML says it would run a function's operations."""

    function: str
    operations: int
    engine: int
    """Operations on the Neural Engine."""
    cost: float
    """Their share of the function's estimated cost."""
    elsewhere: dict[str, int]
    """The others, counted by kind."""


class Written(msgspec.Struct, frozen=True, tag="written", forbid_unknown_fields=True):
    """The golden stage is over."""


class Broken(msgspec.Struct, frozen=True, tag="broken", forbid_unknown_fields=True):
    """The stage can't be carried out; why, in a sentence."""

    text: str


ExaminationReport: TypeAlias = Agreed | Predicted | Timed | Placed | Written | Broken
"""One JSON object a line of the process's standard output."""
