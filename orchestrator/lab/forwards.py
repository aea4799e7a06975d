"""A model's forwards by width and context, examined by one program that imports MLX: its order and its reports.

A GPU sums in another order at another width, in the model's own type: where two tokens are nearly tied, the other one
may come out, and the text is another one from there on.
"""

from collections.abc import Generator, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from orchestrator.machine.hardware import worker_environment
from protocol.child_process import reports
from protocol.messages.base import Level

WHOLE_FLOAT32 = {"MLX_ENABLE_TF32": "0"}
"""For the environment of processes that compute in float32: an M5 and CUDA otherwise multiply it in 19 bits (MLX,
mlx/utils.h, enable_tf32; read once, at the first product)."""
TIE = 0.5
"""Standard deviations of a place's logits. Sums in another order decide between tokens that are nearly tied; a flip
across a larger gap is a defect. Assumed: the largest of millions of rounding errors in 16 bits."""
Precision: TypeAlias = Literal["stored", "float32", "bfloat16", "float16"]
"""stored: as the model's files and this machine's device have it; else every weight unpacked to this type."""
Shape: TypeAlias = Literal["chain", "tree", "joint"]
"""tree: the chain, with one more leaf beside its first token, so that attention has a mask; joint: such trees of three
texts in one forward."""
Loop: TypeAlias = Literal["mlx-lm", "waited", "unstaged", "ahead"]
"""mlx-lm's own loop; ours, each result awaited before the next forward is built; the same, no forward dispatched before
it is built whole; ours, the next forward dispatched before the last one's result is awaited, so that the device has
always work: a single row takes the last one's token before anybody reads it."""


class Parting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What two texts share, and how each of them goes on."""

    tokens: tuple[int, ...]
    """The prompt and the shared text."""
    following: tuple[int, ...]
    """The next token of each; one of them alone where the other text ends."""
    temperature: float
    seed: int


def parting(prompt: Sequence[int], one: Sequence[int], other: Sequence[int], temperature: float, seed: int) -> Parting:
    """Of two texts that differ."""
    shared = next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    following = tuple(text[shared] for text in (one, other) if len(text) > shared)
    assert following, "the texts are equal"
    return Parting((*prompt, *one[:shared]), following, temperature, seed)


class ForwardOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last argument of the process, in JSON."""

    folder: str = ""
    """Of the model; none: a network with random weights, a small mixture of experts or a drafter."""
    drafter: int = 0
    """Elements of the states of an EAGLE-3 drafter, of which rows without the head are forwards."""
    precision: Precision = "stored"
    tokens: tuple[int, ...] = ()
    """A text, whose logits are compared."""
    prompt: int = 64
    """Its first tokens are read as a prompt."""
    compared: tuple[int, ...] = ()
    """Widths whose logits are compared with those of width 1."""
    joint: bool = False
    """In joint forwards too."""
    timed: tuple[int, ...] = ()
    """Widths whose time is measured."""
    contexts: tuple[int, ...] = ()
    """Tokens in front of a timed forward. Those of long ones are made up, so they may exceed the model's own."""
    samples: int = 8
    """Forwards of each width and context; their median counts."""
    rounds: int = 0
    """Of each loop that is timed, single rows behind these contexts too; 0: none is."""
    partings: tuple[Parting, ...] = ()


class ForwardsReady(msgspec.Struct, frozen=True, tag="loaded", forbid_unknown_fields=True):
    """The model is ready."""

    device: str
    """GPU or processor."""
    activations: str
    """Element type of the logits, or of what a drafter leaves."""
    size: int = 0
    """Bytes of the weights."""
    level: Level = "tree"
    reason: str = ""
    """Why the level is not a higher one."""


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


class Ties(msgspec.Struct, frozen=True, tag="ties", forbid_unknown_fields=True):
    """How near the two best logits of width 1 are to each other."""

    positions: int
    equal: int
    """Positions at which they are equal."""
    near: int
    """Positions at which they differ by one unit of the last place at most, equal ones included."""


class ForwardTimed(msgspec.Struct, frozen=True, tag="timed", forbid_unknown_fields=True):
    """A forward over a chain behind a context, the logits included."""

    width: int
    context: int
    milliseconds: float
    """The median."""
    first: float = 0.0
    """Milliseconds of the first one in this process."""


class Gap(msgspec.Struct, frozen=True, tag="gap", forbid_unknown_fields=True):
    """Of one parting, in the order of the partings."""

    gap: float
    """From the best token down to the worse of the two that follow, noise included, in standard deviations of the
    logits."""


class LoopTimed(msgspec.Struct, frozen=True, tag="loop", forbid_unknown_fields=True):
    """The time of a round, on average."""

    loop: Loop
    width: int
    milliseconds: float
    context: int = 0
    """Tokens in front of the first round, if they were made up."""
    memory: float = 0.0
    """MiB, the most beyond what was held at the begin: copies of KV are in it."""


ForwardReport: TypeAlias = ForwardsReady | Compared | Ties | ForwardTimed | LoopTimed | Gap
"""One JSON object a line of the process's standard output."""


_EXAMINATION = "orchestrator.lab.forwards_process"
_FORM: Any = ForwardReport
_GRACE = 10.0


def examined(order: ForwardOrder) -> Generator[ForwardReport]:
    """The reports, as they come; closing it ends the process. Raises PipelineError if the process fails."""
    variables = worker_environment("target", ()) | (WHOLE_FLOAT32 if order.precision == "float32" else {})
    return reports(_EXAMINATION, order, _FORM, name="The examination of forwards", grace=_GRACE, variables=variables)
