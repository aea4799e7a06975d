"""Messages between clients and the orchestrator. Each union at the end names who may say what to whom."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from protocol.errors import Blame
from protocol.messages.base import MAX_CONTEXT, MAX_NODES, Message, MessagePart, Role, ShortText, Token
from protocol.messages.sampling import Likelihoods, Sampling


class Submit(Message, frozen=True):
    """Continue a prompt, given as text or as tokens."""

    request: ShortText
    prompt: Annotated[str, Meta(max_length=16 << 20)] | None
    tokens: Annotated[tuple[Token, ...], Meta(max_length=MAX_CONTEXT)] | None
    sampling: Sampling
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]
    stop: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=1024)], ...], Meta(max_length=64)] = ()


class Cancel(Message, frozen=True):
    """End a request; what was generated so far is answered with Done."""

    request: ShortText


class Inquire(Message, frozen=True):
    """Ask for the pipeline's State; answered now and again when it becomes ready or fails."""


class PipelineState(Message, frozen=True):
    """What a client needs to know before it submits."""

    session: ShortText
    """The pipeline's own folder: no two pipelines have the same."""
    ready: bool
    failure: ShortText | None
    blame: Blame
    target: ShortText
    draft: ShortText
    strategy: ShortText
    context: int
    vocabulary: int
    down: tuple[Role, ...] = ()
    """Roles that were filled and are not now: the pipeline goes on as well as it can."""
    lost: int = 0
    """Workers that went down so far; local ones are restarted."""


class Output(Message, frozen=True):
    """More text. A token whose text is still incomplete arrives with the text so far."""

    request: ShortText
    text: Annotated[str, Meta(max_length=1 << 20)]
    tokens: Annotated[tuple[Token, ...], Meta(max_length=MAX_NODES)]
    hit: bool | None = None
    """Whether the next speculation was there already; None where there is no such thing."""
    likelihoods: Likelihoods = ()
    """Of each of the tokens, if they were asked for."""


class Pace(MessagePart, frozen=True, kw_only=True):
    """How well a run kept to the pace of the device that it stands for."""

    profile: ShortText
    forwards: int
    overruns: int
    """Forwards whose real work took longer than the device would."""
    stretch: float
    """Seconds beyond the device's, late awakenings included, as a share of the device's."""
    valid: bool
    """At most 1% of the forwards overran; figures of an invalid run say nothing of the device."""


class Statistics(MessagePart, frozen=True, kw_only=True):
    """Figures of one request. Rates are None where the strategy has no such thing."""

    prompt_tokens: int
    generated_tokens: int
    elapsed: float
    """Seconds from the request's arrival to its last token."""
    time_to_first_token: float
    """Seconds from the request's arrival to the first token's departure."""
    tokens_per_second: float
    """Generated tokens divided by the seconds from the end of prefilling to the last token."""
    rounds: int
    tokens_per_round: float
    hit_rate: float | None
    """Share of rounds whose root had an evaluated child at the moment of its verdict."""
    acceptance_rate: float | None
    """Share of accepted tokens among those whose parent was accepted and had a child verified."""
    acceptance_by_depth: tuple[float, ...]
    target_busy: float
    draft_busy: float
    wasted_draft_share: float | None
    """Share of evaluated draft nodes that led to no accepted token."""
    overhead_per_round: float
    """Median seconds between one verdict's compute end and the next verify's compute begin."""
    adopted_tokens: int = 0
    """Tokens whose KV the target took over instead of evaluating them, restarts included."""
    prefill_seconds: float = 0.0
    """Seconds that the target evaluated tokens before the first root and, after restarts, later ones."""
    pace: Pace | None = None
    """Of a paced run."""


class Done(Message, frozen=True):
    """The request ended."""

    request: ShortText
    finish_reason: Literal["stop", "length", "cancelled"]
    statistics: Statistics
    stop: ShortText | None = None
    """The stop string that ended it; None for the model's own end."""


class Refused(Message, frozen=True):
    """The request can't be served; nothing of it remains."""

    request: ShortText
    text: ShortText
    blame: Blame


FromClient: TypeAlias = Submit | Cancel | Inquire
ToClient: TypeAlias = PipelineState | Output | Done | Refused
