"""Arguments and reports of a process that examines a converted model on its device. Plain types.

Each stage is a process of its own: a device's compiler or driver may crash or hang the process that calls it.
"""

from typing import Literal, TypeAlias

import msgspec

Stage: TypeAlias = Literal["golden", "predict", "plan"]
"""golden: the executor's logits, to a file; predict: the device's logits, many times; plan: where operations run."""
RuntimeName: TypeAlias = Literal["coreml", "executor"]
Units: TypeAlias = Literal["CPU_AND_NE", "CPU_ONLY"]


class ExaminationOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last argument of the process, in JSON."""

    folder: str
    """Of the converted model."""
    stage: Stage
    golden: str
    """File of the executor's logits: written by the golden stage, read by the predict stage."""
    runtime: RuntimeName = "coreml"
    units: Units = "CPU_AND_NE"
    predicts: int = 300


class Loading(msgspec.Struct, frozen=True, tag="loading", forbid_unknown_fields=True):
    """Something begins to load. A device's compiler may be silent for many minutes until the next report."""

    width: int | None
    """The function; None: the whole package."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded", forbid_unknown_fields=True):
    """The function of this width is loaded."""

    width: int
    seconds: float


class Agreed(msgspec.Struct, frozen=True, tag="agreed", forbid_unknown_fields=True):
    """How the device's logits compare with the executor's."""

    width: int
    deviation: float | None
    """Root mean square of the difference, in standard deviations of a token's logits; None if the device's logits are
    not finite."""
    clear: int
    """Tokens at which the executor's favourite is so far ahead that such a deviation can't change it."""
    same: int
    """Those of them at which the device has the same favourite."""


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
    """Where Core ML would run a function's operations, by its own report."""

    function: str
    operations: int
    engine: int
    """Operations on the Neural Engine."""
    cost: float
    """Their share of the function's estimated cost."""
    elsewhere: dict[str, int]
    """The other operations, counted by kind."""


class Written(msgspec.Struct, frozen=True, tag="written", forbid_unknown_fields=True):
    """The golden stage has ended."""


class Broken(msgspec.Struct, frozen=True, tag="broken", forbid_unknown_fields=True):
    """The stage has failed, with a sentence that says why."""

    text: str
    lasting: bool = True
    """The cause is the model or the system, so that the stage would fail again; not a full disk, for example."""


ExaminationReport: TypeAlias = Loading | Loaded | Agreed | Predicted | Timed | Placed | Written | Broken
"""One JSON object a line of the process's standard output."""
