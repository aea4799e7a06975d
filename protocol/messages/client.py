"""Messages between clients and the orchestrator. The unions at the end list the messages of each direction."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from protocol.errors import Blame
from protocol.messages.base import MAX_CONTEXT, MAX_NODES, Level, Message, MessagePart, Role, ShortText, StartUp, Token
from protocol.messages.sampling import ModelSampling, RequestedSampling, TokenLogprobs


class ThoughtText(MessagePart, frozen=True):
    """A thought in the text of an output: from `start`, which may begin the output or come behind a mark, or from the
    output's beginning if it is `opened`, up to `end`."""

    start: Annotated[str, Meta(max_length=256)]
    end: Annotated[str, Meta(min_length=1, max_length=256)]
    opened: bool = False


class Submit(Message, frozen=True):
    """Continue a prompt, given as text or as tokens."""

    request: ShortText
    prompt: Annotated[str, Meta(max_length=16 << 20)] | None
    tokens: Annotated[tuple[Token, ...], Meta(max_length=MAX_CONTEXT)] | None
    sampling: RequestedSampling
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]
    stop: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=1024)], ...], Meta(max_length=256)] = ()
    draft_tokens: Annotated[int, Meta(ge=1, le=64)] | None = None
    """K of this request, where the pipeline's strategy verifies chains; None for the pipeline's K."""
    shown: Annotated[tuple[Token, ...], Meta(max_length=64)] = ()
    """Special tokens whose text is part of the output, for instance the markers of a thought. Others are left out."""
    marked: Annotated[tuple[Token, ...], Meta(max_length=64)] = ()
    """Tokens whose text comes behind a mark, which tells it from the same text in other tokens."""
    thought: ThoughtText | None = None
    """Where no stop string is looked for."""
    shared_prefix: Annotated[int, Meta(ge=0, le=MAX_CONTEXT)] = 0
    """The prompt's first tokens that other conversations begin with too (instructions, tools); 0: not known."""
    background: bool = False
    """Nobody waits for the answer: the request yields to others."""
    seeded: bool = False
    """The caller chose the seed: where tokens may depend on the others in a forward, it has forwards of its own."""


class Cancel(Message, frozen=True):
    """End a request. The answer is Done, with the statistics of what was generated so far."""

    request: ShortText


class Inquire(Message, frozen=True):
    """Request the PipelineState. The answer comes at once, and again when the pipeline becomes ready or fails."""


class PipelineState(Message, frozen=True):
    """What a client needs to know before it submits."""

    session: ShortText
    """The pipeline's own folder, which identifies the pipeline."""
    ready: bool
    failure: ShortText | None
    blame: Blame
    target: ShortText
    draft: ShortText
    strategy: ShortText
    context: int
    vocabulary: int
    down: tuple[Role, ...] = ()
    """Roles whose worker is down at present. The pipeline continues without it as far as that is possible."""
    lost: int = 0
    """Workers that went down so far; local ones are restarted."""
    level: Level = "tree"
    """What the target verifies in one forward."""
    kv_warnings: int = 0
    """How often so far KV of other requests was lost: arenas that were not adopted, files of the disk cache that were
    not used, disks that were late, and disk caches that were turned off. Each costs a prefill, and no token."""
    sampling: ModelSampling = ModelSampling()
    """For fields that a request leaves open."""
    start: StartUp = ()
    """The orchestrator's parts and the target's, which overlap."""


class Reading(Message, frozen=True):
    """The target reads the prompt of a request, at most four times a second; or the request waits for a place."""

    request: ShortText
    tokens: Annotated[int, Meta(ge=0, le=MAX_CONTEXT)]
    """Tokens of it that have KV."""
    total: Annotated[int, Meta(ge=0, le=MAX_CONTEXT)]
    queued: Annotated[int, Meta(ge=0)] = 0
    """Its place in the queue, from 1 on; 0: it waits for none."""


class Output(Message, frozen=True):
    """New tokens and their text. The text of a token may be incomplete; its rest follows in a later Output."""

    request: ShortText
    text: Annotated[str, Meta(max_length=1 << 20)]
    tokens: Annotated[tuple[Token, ...], Meta(max_length=MAX_NODES)]
    token_logprobs: TokenLogprobs = ()
    """One for each token, if the request asks for log-probabilities."""
    prompt_token_logprobs: TokenLogprobs = ()
    """Of the next tokens of the prompt, from the second one on, if the request asks for them."""


class Pace(MessagePart, frozen=True, kw_only=True):
    """How well a paced run kept to its device profile."""

    profile: ShortText
    forwards: int
    overruns: int
    """Forwards whose real work took longer than the device would."""
    stretch: float
    """Time beyond the device's, late awakenings included, as a share of the device's time."""
    valid: bool
    """At most 1% of the forwards overran. Figures of an invalid run do not describe the device."""


class Statistics(MessagePart, frozen=True, kw_only=True):
    """Figures of one request. A rate that does not exist under the strategy is None."""

    prompt_tokens: int
    generated_tokens: int
    elapsed: float
    """Seconds from the request's arrival to its last token."""
    time_to_first_token: float
    """Seconds from the request's arrival until the first token was sent."""
    tokens_per_second: float
    """Generated tokens divided by the seconds from the end of prefilling to the last token."""
    rounds: int
    tokens_per_round: float
    hit_rate: float | None
    """Share of verdicts that were hits: the new root already had children in the tree."""
    acceptance_rate: float | None
    """Share of accepted tokens among those whose parent was accepted and had a child verified."""
    acceptance_by_depth: tuple[float, ...]
    target_busy: float
    draft_busy: float
    wasted_draft_share: float | None
    """Share of evaluated draft nodes that were not accepted."""
    overhead_per_round: float
    """Median seconds from the end of one target forward to the begin of the next one."""
    adopted_tokens: int = 0
    """Tokens whose KV the target adopted instead of evaluating them, restarts included."""
    prefill_seconds: float = 0.0
    """Seconds of the target's prefills: of the prompt and, after restarts, of later tokens."""
    saving_seconds: float = 0.0
    """Seconds in which the target saved KV of any request between this one's rounds."""
    pace: Pace | None = None
    """Of a paced run."""
    overlapped_rounds: int = 0
    """Rounds in which the draft could compute while the target did. In the others it took turns with the target, or
    there was none."""
    plain_tokens_per_second: float | None = None
    """Of plain decoding in this request's conditions, estimated. None where nothing was guessed, and where the request
    shared most forwards with other ones."""
    draft_tokens: int = 0
    """Tokens that the draft had guessed."""
    lookup_tokens: int = 0
    """Tokens that prompt lookup had guessed."""

    @property
    def speedup(self) -> float | None:
        """How many times faster than plain decoding, estimated."""
        plain = self.plain_tokens_per_second
        return self.tokens_per_second / plain if plain else None

    @property
    def overlapped_hit_rate(self) -> float | None:
        """The hit rate where it says something: draft and target computed at the same time in most rounds."""
        return self.hit_rate if 2 * self.overlapped_rounds > self.rounds else None


class Done(Message, frozen=True):
    """The request ended."""

    request: ShortText
    finish_reason: Literal["stop", "length", "cancelled"]
    statistics: Statistics
    stop: ShortText | None = None
    """The stop string that ended the request; None if it ended for another reason."""


class Refused(Message, frozen=True):
    """The request can't be served and has ended."""

    request: ShortText
    text: ShortText
    blame: Blame


FromClient: TypeAlias = Submit | Cancel | Inquire
ToClient: TypeAlias = PipelineState | Reading | Output | Done | Refused
