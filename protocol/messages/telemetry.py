"""Messages by which a client watches the pipeline: each `Watch` is answered with one `TelemetryFrame`.

A frame is only sent on request, so a subscriber that is slow or gone delays nothing. Frames hold the text of other
clients' requests: the orchestrator's client frontend decides which clients may ask.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from protocol.messages.base import Message, MessagePart, PlainText, Probability, Role, Seconds, ShortText, WireRequest
from protocol.messages.client import FromClient, Statistics, ToClient

MAX_NODES = 48
"""Nodes of one token tree in a frame."""
MAX_ROUNDS = 16
"""Rounds in one frame: 320 a second at 20 frames a second."""
MAX_SPANS = 128
MAX_ENDED = 8
MAX_REQUESTS = 32
MAX_DEPTHS = 32
MAX_CHARACTERS = 48
"""Characters of one token's text."""
_MAX_WORKERS = 32

Serial: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 53)]
"""Number of the last recorded event in one life of the orchestrator."""
Key: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 53)]
"""The lower 53 bits of a node's id, which JavaScript's numbers hold: a node has the same key in all frames."""
TokenText: TypeAlias = Annotated[str, Meta(max_length=MAX_CHARACTERS)]
ClockTime: TypeAlias = Annotated[float, Meta(ge=-1e12, le=1e12)]
"""Seconds on the orchestrator's clock."""
Index: TypeAlias = Annotated[int, Meta(ge=-1, lt=MAX_NODES)]
DepthCounts: TypeAlias = Annotated[tuple[int, ...], Meta(max_length=MAX_DEPTHS)]
"""One count for each depth below the root, from depth 1 on."""


class Watch(Message, frozen=True):
    """Asks for one TelemetryFrame. It comes at once if something happened after `after`, else within about a second."""

    after: Serial = 0
    """Serial of the subscriber's last frame."""
    request: WireRequest | None = None
    """The request to show in detail; None, or a request that has ended, selects the latest."""


class TreeSnapshot(MessagePart, frozen=True, kw_only=True):
    """A token tree in parallel arrays, parents before their children; entry 0 is the root."""

    keys: Annotated[tuple[Key, ...], Meta(max_length=MAX_NODES)]
    texts: Annotated[tuple[TokenText, ...], Meta(max_length=MAX_NODES)]
    parents: Annotated[tuple[Index, ...], Meta(max_length=MAX_NODES)]
    probabilities: Annotated[tuple[Probability | None, ...], Meta(max_length=MAX_NODES)]
    """The draft's probability of the token given its parent; None for a token from prompt lookup."""
    path_probabilities: Annotated[tuple[Probability, ...], Meta(max_length=MAX_NODES)]
    """Estimated probability of the path from the root to the node."""


class VerifiedRound(MessagePart, frozen=True, kw_only=True):
    """A round whose verdict has arrived."""

    request: WireRequest
    round: int
    begin: ClockTime
    end: ClockTime
    tree: TreeSnapshot
    """The verified tree, or its first nodes."""
    width: int
    """Tokens in the target's forward that belonged to this request."""
    accepted: Annotated[tuple[Index, ...], Meta(max_length=MAX_NODES)]
    """The accepted path as entries of `tree`, top down, without the root."""
    committed: int
    """Tokens that the round committed, the bonus token included."""
    bonus: TokenText
    hit: bool | None
    """Whether the tree already had the new root; None where the round could not hit."""


class WorkSpan(MessagePart, frozen=True, kw_only=True):
    """One unit of a worker's work. It ends when its result arrives, and begins the reported seconds earlier."""

    role: Role
    incarnation: int
    kind: Literal["grow", "verify", "prefill"]
    request: WireRequest
    begin: ClockTime
    end: ClockTime
    tokens: int
    """Tokens that were evaluated."""
    accepted: int
    """Accepted nodes of a verification; 0 for other work."""


class FinishedRequest(MessagePart, frozen=True, kw_only=True):
    """A request that has ended."""

    request: WireRequest
    end: ClockTime
    statistics: Statistics


class WorkerSummary(MessagePart, frozen=True, kw_only=True):
    """A worker that is up."""

    role: Role
    incarnation: int
    engine: PlainText
    model: PlainText
    device: PlainText
    remote: bool
    """The worker runs on another machine."""
    status: Literal["active", "on trial", "standby"] | None = None
    """Status of a draft; None for other roles."""


class RequestSummary(MessagePart, frozen=True, kw_only=True):
    """A request in progress."""

    request: WireRequest
    name: ShortText
    """By which its client knows it: that of `Submit`."""
    phase: Literal["waiting", "prefilling", "ready", "verifying"]
    generated_tokens: int


class RequestSnapshot(MessagePart, frozen=True, kw_only=True):
    """The selected request in its present state."""

    request: WireRequest
    round: int
    last_tokens: Annotated[tuple[TokenText, ...], Meta(max_length=MAX_NODES)]
    """The last committed tokens; the final one is the root."""
    prompt_part: int
    """How many of `last_tokens` belong to the prompt."""
    tree: TreeSnapshot
    """The most probable nodes, and all nodes under verification."""
    verifying: Annotated[tuple[Index, ...], Meta(max_length=MAX_NODES)]
    """Entries of `tree` that are under verification."""
    nodes: int
    """Nodes of the whole tree."""
    prompt_tokens: int
    adopted_tokens: int
    prefill_seconds: Seconds
    """Of the target."""
    generated_tokens: int
    decode_seconds: Seconds
    """From the end of prefill to the last token."""
    rounds: int
    hits: int
    hit_chances: int
    """Rounds that could have hit."""
    overlapped_rounds: int
    """As in `Statistics`, so far."""
    accepted: DepthCounts
    """Rounds in which the node at that depth was accepted."""
    tried: DepthCounts
    """Rounds in which the parent was accepted and had a child under verification."""
    target_seconds: Seconds
    draft_seconds: Seconds
    plain_tokens_per_second: float | None
    """As in `Statistics`, so far."""


class TelemetryFrame(Message, frozen=True, kw_only=True):
    """What happened since the subscriber's last frame, and the present state."""

    serial: Serial
    at: ClockTime
    dropped: int
    """Spans and rounds since the last frame that this frame has no room for."""
    uses_draft: bool
    """The strategy uses a draft."""
    workers: Annotated[tuple[WorkerSummary, ...], Meta(max_length=_MAX_WORKERS)]
    requests: Annotated[tuple[RequestSummary, ...], Meta(max_length=MAX_REQUESTS)]
    """The oldest requests, and the selected one."""
    selected: RequestSnapshot | None
    verified: Annotated[tuple[VerifiedRound, ...], Meta(max_length=MAX_ROUNDS)]
    spans: Annotated[tuple[WorkSpan, ...], Meta(max_length=MAX_SPANS)]
    ended: Annotated[tuple[FinishedRequest, ...], Meta(max_length=MAX_ENDED)] = ()
    """The last requests that ended."""


FromClientOrSubscriber: TypeAlias = FromClient | Watch
"""All messages that the client frontend receives."""
ToClientOrSubscriber: TypeAlias = ToClient | TelemetryFrame
