"""Types with bounds for the fields of messages, and the two base structs. Knows no message."""

from typing import Annotated, Literal, NewType, TypeAlias

import msgspec
from msgspec import Meta

VERSION = 26
"""Raised whenever the meaning of a message changes. Peers of another version are refused."""
MAX_CONTEXT = 1 << 20
"""Most tokens a Start may carry."""
MAX_COSTS = 64
"""Most measured widths of one Hello."""
MAX_STARTED = 8
"""Most parts of a start."""
MAX_NODES = 1024
"""Most tree nodes one message may carry."""
MAX_STEPS = 256
"""Most growth steps below one root that a draft may be asked for."""
MAX_TREES = 64
"""Most trees of one Forest."""
MAX_FAN = 64
"""Most guesses behind one node that a plan asks for."""
MAX_ALTERNATIVES = 20
"""Most tokens whose log-probabilities a request may ask for at each position."""
MAX_SCHEMA = 1 << 16
"""Most characters of a JSON schema."""
MAX_FUNCTIONS = 256
"""Most tools of a request."""
MAX_FORMS = 1024
"""Most forms that a part of a grammar may have."""
MAX_PARTS = 2048
"""Most parts of one form."""
MAX_MARKER = 16
"""Most tokens of a marker around a thought."""
MAX_EOS_TOKENS = 64
"""Most end-of-sequence tokens of a model."""
MAX_DEVIATION = 99.0
"""The largest deviation of logits that is told, in standard deviations."""
LEAST_LOG_PROBABILITY = -9999.0
"""Lower log-probabilities are sent as this one: JSON has no infinity."""
RequestId = NewType("RequestId", int)
NodeId = NewType("NodeId", int)
Token: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
Position: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_CONTEXT)]
Round: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 53)]
Probability: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
LogProbability: TypeAlias = Annotated[float, Meta(ge=LEAST_LOG_PROBABILITY, le=0.0)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e6)]
Deviation: TypeAlias = Annotated[float, Meta(ge=0.0, le=MAX_DEVIATION)]
ForwardWidth: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_NODES + 1)]
"""Tokens of one forward, root included."""
ForwardSeconds: TypeAlias = Annotated[float, Meta(ge=1e-6, le=1e4)]
Costs: TypeAlias = Annotated[tuple[tuple[ForwardWidth, ForwardSeconds], ...], Meta(max_length=MAX_COSTS)]
ContextCosts: TypeAlias = Annotated[tuple[tuple[ForwardWidth, Seconds], ...], Meta(max_length=MAX_COSTS)]
WireRequest: TypeAlias = Annotated[RequestId, Meta(ge=0, lt=1 << 53)]
WireNode: TypeAlias = Annotated[NodeId, Meta(ge=0, le=(1 << 63) - 1)]
Nodes: TypeAlias = Annotated[tuple[WireNode, ...], Meta(max_length=MAX_NODES)]
TreeTokens: TypeAlias = Annotated[tuple[Token, ...], Meta(min_length=1, max_length=MAX_NODES)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_CONTEXT)]
"""Of tokens or nodes."""
Moment: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e12)]
"""Seconds on some process's clock."""
ShortText: TypeAlias = Annotated[str, Meta(max_length=4096)]
_UNSEEN = (
    r"\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    r"\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    r"\U000e0001-\U000e007f"
)
"""Characters that are controls, end a line, or change how others are shown, such as the order of a line (Unicode's
categories Cc, Cf, Zl and Zp)."""
PlainText: TypeAlias = Annotated[str, Meta(max_length=4096, pattern=rf"\A[^{_UNSEEN}]*\Z")]
"""Text of a worker: one line as it looks. It is shown in logs and tables, where another line, or a line in another
order, would be taken for one of ours. See `plain`."""
Vocabulary: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 20)]
"""Four times what any model has. Bounded because noise is computed for whole rows."""
Level: TypeAlias = Literal["tree", "chain", "plain"]
"""What one forward of a model evaluates: any token tree; one path of several tokens; one token."""
ArenaName: TypeAlias = Annotated[str, Meta(max_length=23, pattern=r"\Alp-[0-9a-f]{20}\Z")]
"""A name that `segments.create_segment` gives. No other name from the wire is ever opened."""
StartUp: TypeAlias = Annotated[tuple[tuple[PlainText, Seconds], ...], Meta(max_length=MAX_STARTED)]
"""Seconds of what was done at a start, by name."""
Role = Literal["draft", "target", "prefill"]


def plain(text: str) -> str:
    """`text` as a PlainText."""
    return "".join(c if c.isprintable() else " " if c in "\t\n" else "?" for c in text[:4096])


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=str.lower):
    """Base of all messages; the tag is the class name in lower case."""


class MessagePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the structs inside messages."""
