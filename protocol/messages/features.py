"""The target's hidden states, the features that a trained drafter reads: which ones, and where they lie."""

from itertools import pairwise
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta

from protocol.messages.base import MAX_CONTEXT, ArenaName, Message, MessagePart, Position, Round, WireRequest

FINAL = -1
"""The last layer's output behind the final norm."""
MAX_OUTPUTS = 32
"""Most outputs that are recorded at once."""
MAX_WIDTH = 1 << 15
"""Most elements of one output."""

Output: TypeAlias = Annotated[int, Meta(ge=FINAL, lt=1024)]
"""A layer, counted from 0: the residual stream behind it; or FINAL."""
Outputs: TypeAlias = Annotated[tuple[Output, ...], Meta(max_length=MAX_OUTPUTS)]
"""Ascending; one token's features are the outputs in this order."""
OutputWidth: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_WIDTH)]


class FeatureForm(MessagePart, frozen=True):
    """What a drafter reads of a target for each token: `outputs`, each of `width` elements."""

    outputs: Annotated[Outputs, Meta(min_length=1)]
    width: OutputWidth

    def __post_init__(self) -> None:
        _require_ascending(self.outputs)

    @property
    def elements(self) -> int:
        """Of a row, which joins a token's outputs."""
        return len(self.outputs) * self.width


class Taps(MessagePart, frozen=True):
    """What a target can record: the outputs of `layers` layers, each of `width` elements, and FINAL."""

    layers: Annotated[int, Meta(ge=1, le=1024)]
    width: OutputWidth

    def lack(self, form: FeatureForm) -> str:
        """Why a drafter can't read this target, as half a sentence; empty if it can."""
        if form.width != self.width:
            return f"it reads states of {form.width} numbers, and the target's have {self.width}"
        if max(form.outputs) >= self.layers:
            return f"it reads layer {max(form.outputs)}, and the target has {self.layers} layers"
        return ""


class Tap(Message, frozen=True):
    """To a target: record these outputs from now on, for all sequences. Empty: record nothing."""

    outputs: Outputs

    def __post_init__(self) -> None:
        _require_ascending(self.outputs)


class Features(Message, frozen=True):
    """A feature ring holds the outputs of `rows` committed tokens of a sequence, from position `first` on.

    While it records, a target sends one after each chunk of a prompt and after each Verdict, behind it. The
    orchestrator sends it on to the drafts that read features.
    """

    request: WireRequest
    round: Round
    """That of the root behind these tokens; while the prompt is prefilled, that of the Start."""
    name: ArenaName
    first: Position
    rows: Annotated[int, Meta(ge=0, le=MAX_CONTEXT)]


class FeatureBlock(Message, frozen=True):
    """To a remote draft, or from a remote target: features of `rows` committed tokens of a sequence, from position
    `first` on.

    It replaces Features, since the ring is on another machine. The rows' bytes are in a second frame.
    """

    request: WireRequest
    round: Round
    """As that of Features."""
    first: Position
    rows: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]
    form: FeatureForm
    element: Annotated[int, Meta(ge=1, le=3)]
    """An ElementType."""
    checksum: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    """Of the bytes."""
    number: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    """From a target: counts its blocks, for FeaturesTaken."""


class FeatureShipment(NamedTuple):
    """A block and its bytes: (rows, elements of the form) of its element type."""

    block: FeatureBlock
    payload: bytes


class FeaturesTaken(Message, frozen=True):
    """To a remote target: its FeatureBlocks up to this number have arrived, so that it may send more."""

    number: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


def _require_ascending(outputs: tuple[int, ...]) -> None:
    # msgspec turns this into a ValidationError when it decodes a message.
    if any(later <= earlier for earlier, later in pairwise(outputs)):
        raise ValueError("the outputs must ascend")
