"""Messages by which a client watches the pipeline work: one question, one scene, as often as the watcher likes.

Nothing is sent that was not asked for, so a watcher that is slow, or gone, holds nothing up. Scenes hold the text of
other clients' requests: who may ask is the desk's affair.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from protocol.messages.base import Message, MessagePart, PlainText, Probability, Role, Seconds, WireSequence
from protocol.messages.client import FromClient, Statistics, ToClient

MOST_NODES = 48
"""Of a token tree in a scene."""
MOST_JUDGED = 16
"""Rounds in one scene: with twenty scenes a second, 320 a second."""
MOST_SPANS = 128
MOST_OVER = 8
MOST_REQUESTS = 32
MOST_DEPTHS = 32
MOST_CHARACTERS = 48
"""Of one token's text."""
_MOST_WORKERS = 32

Serial: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 53)]
"""Counts what happened in one life of the orchestrator."""
Key: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 53)]
"""The lower bits of a node's id, as many as JavaScript's numbers hold: the same node has the same key in all scenes."""
TokenText: TypeAlias = Annotated[str, Meta(max_length=MOST_CHARACTERS)]
ClockTime: TypeAlias = Annotated[float, Meta(ge=-1e12, le=1e12)]
"""Seconds on the orchestrator's clock."""
Index: TypeAlias = Annotated[int, Meta(ge=-1, lt=MOST_NODES)]
DepthCounts: TypeAlias = Annotated[tuple[int, ...], Meta(max_length=MOST_DEPTHS)]
"""One count a depth below the root, from 1 on."""


class Watch(Message, frozen=True):
    """What has happened since? Answered with one Scene: soon if something has, otherwise within a second or so."""

    after: Serial = 0
    """That of the last scene."""
    sequence: WireSequence | None = None
    """The request to look at; None, or one that is over, is the latest."""


class TreeSnapshot(MessagePart, frozen=True, kw_only=True):
    """A token tree in parallel arrays, parents before their children; entry 0 is the root."""

    keys: Annotated[tuple[Key, ...], Meta(max_length=MOST_NODES)]
    texts: Annotated[tuple[TokenText, ...], Meta(max_length=MOST_NODES)]
    parents: Annotated[tuple[Index, ...], Meta(max_length=MOST_NODES)]
    chances: Annotated[tuple[Probability | None, ...], Meta(max_length=MOST_NODES)]
    """As the draft claims, given the parent; None for what was looked up in the text."""
    paths: Annotated[tuple[Probability, ...], Meta(max_length=MOST_NODES)]
    """Probability of getting there from the root, as it is believed."""


class VerifiedRound(MessagePart, frozen=True, kw_only=True):
    """A round that is over."""

    sequence: WireSequence
    round: int
    begin: ClockTime
    end: ClockTime
    sent: TreeSnapshot
    """What was verified, or its first nodes."""
    width: int
    """Tokens in the target's forward that belonged to this request."""
    accepted: Annotated[tuple[Index, ...], Meta(max_length=MOST_NODES)]
    """The path of nodes that were kept, top down."""
    tokens: int
    """That the round gave, the bonus included."""
    bonus: TokenText
    hit: bool | None
    """Whether there was something below the bonus already; None where there is no such thing."""


class WorkSpan(MessagePart, frozen=True, kw_only=True):
    """One unit of a worker's work, dated back from the arrival of its result by the seconds that it says it took."""

    role: Role
    incarnation: int
    kind: Literal["grow", "verify", "prefill"]
    sequence: WireSequence
    begin: ClockTime
    end: ClockTime
    tokens: int
    """That were evaluated."""
    kept: int
    """Of a verification: accepted nodes."""


class FinishedRequest(MessagePart, frozen=True, kw_only=True):
    """A request that has ended."""

    sequence: WireSequence
    end: ClockTime
    statistics: Statistics


class WorkerSummary(MessagePart, frozen=True, kw_only=True):
    """A worker that is up."""

    role: Role
    incarnation: int
    engine: PlainText
    model: PlainText
    device: PlainText
    guest: bool
    status: Literal["active", "on trial", "standby"] | None = None
    """Of a draft."""


class RequestSummary(MessagePart, frozen=True, kw_only=True):
    """A request in progress."""

    sequence: WireSequence
    phase: Literal["waiting", "prefilling", "ready", "verifying"]
    generated: int
    since: Seconds
    """Age."""


class RequestSnapshot(MessagePart, frozen=True, kw_only=True):
    """The request that is looked at, as it is now."""

    sequence: WireSequence
    round: int
    tail: Annotated[tuple[TokenText, ...], Meta(max_length=MOST_NODES)]
    """Its last committed tokens; the last of all is the root."""
    prompt: int
    """How many of those the prompt's are."""
    tree: TreeSnapshot
    """Its most probable part, and all that is under verification."""
    asked: Annotated[tuple[Index, ...], Meta(max_length=MOST_NODES)]
    """Entries of the tree that are under verification."""
    nodes: int
    """Of the whole tree."""
    prompt_tokens: int
    adopted: int
    prefill: Seconds
    """Of the target."""
    generated: int
    decoding: Seconds
    """From the end of prefilling to the last token."""
    rounds: int
    hits: int
    chances: int
    """Rounds that could have hit."""
    accepted: DepthCounts
    tried: DepthCounts
    """Rounds in which the node above was accepted and had a child under verification, by depth."""
    evaluated: int
    """Nodes that the draft evaluated."""
    target_seconds: Seconds
    draft_seconds: Seconds
    plain: Seconds | None
    """Estimate of what the target takes for one token alone, if it is known."""
    step: Seconds | None
    """Running mean of a growth step."""
    hop: Seconds | None
    """Of what a round takes beyond the target's forward and deliberate waiting."""


class TelemetryFrame(Message, frozen=True, kw_only=True):
    """What the pipeline did since the watcher's last scene, and how it stands."""

    serial: Serial
    at: ClockTime
    lost: int
    """Spans and judged rounds since then that are not told: there were too many."""
    drafts: bool
    """The strategy uses a draft."""
    workers: Annotated[tuple[WorkerSummary, ...], Meta(max_length=_MOST_WORKERS)]
    requests: Annotated[tuple[RequestSummary, ...], Meta(max_length=MOST_REQUESTS)]
    """The oldest ones, and the one that is shown."""
    shown: RequestSnapshot | None
    judged: Annotated[tuple[VerifiedRound, ...], Meta(max_length=MOST_JUDGED)]
    spans: Annotated[tuple[WorkSpan, ...], Meta(max_length=MOST_SPANS)]
    over: Annotated[tuple[FinishedRequest, ...], Meta(max_length=MOST_OVER)] = ()
    """The last ones."""


FromClientOrWatcher: TypeAlias = FromClient | Watch
"""Who comes to the desk."""
ToClientOrWatcher: TypeAlias = ToClient | TelemetryFrame
