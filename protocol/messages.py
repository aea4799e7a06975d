"""Every message that crosses a process border: shapes and bounds, one struct a message.

Knows nothing of sockets, models or clocks. Each union at the end names who may say what to whom; a
frame is decoded against the one union that its direction allows.
"""

from typing import Annotated, Literal, NewType, TypeAlias

import msgspec
from msgspec import Meta

from protocol.errors import Blame

VERSION = 1
"""Raised whenever a struct here changes its meaning; peers of another version are refused."""

MAX_CONTEXT = 1 << 20
"""Most tokens a Start may carry."""
MAX_NODES = 1024
"""Most tree nodes one message may carry."""
MAX_TREES = 64
"""Most trees of one Forest."""
MAX_SUPPORT = 64
"""Tokens a draft distribution may put its mass on in rejection mode."""
MAX_ALTERNATIVES = 20
"""Tokens whose probabilities may be asked for at each position."""
MAX_SCHEMA = 1 << 16
"""Characters of a JSON schema."""
MAX_ENDS = 64
"""End-of-sequence tokens a model may have."""
LEAST_LOG_PROBABILITY = -9999.0
"""What is less probable is told as this: JSON knows no infinity."""

SequenceId = NewType("SequenceId", int)
NodeId = NewType("NodeId", int)

Token: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
Position: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_CONTEXT)]
Round: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 53)]
Probability: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
LogProbability: TypeAlias = Annotated[float, Meta(ge=LEAST_LOG_PROBABILITY, le=0.0)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e6)]

WireSequence: TypeAlias = Annotated[SequenceId, Meta(ge=0, lt=1 << 53)]
WireNode: TypeAlias = Annotated[NodeId, Meta(ge=0, le=(1 << 63) - 1)]
Nodes: TypeAlias = Annotated[tuple[WireNode, ...], Meta(max_length=MAX_NODES)]
TreeTokens: TypeAlias = Annotated[tuple[Token, ...], Meta(min_length=1, max_length=MAX_NODES)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_CONTEXT)]
"""Of tokens or nodes."""
Moment: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e12)]
"""Seconds on some process's clock."""
ShortText: TypeAlias = Annotated[str, Meta(max_length=4096)]
PlainText: TypeAlias = Annotated[str, Meta(max_length=4096, pattern=r"\A[^\x00-\x08\x0b-\x1f\x7f-\x9f]*\Z")]
"""What a worker says of itself: it ends up in logs and on terminals, so it has no control characters; see `plain`."""
Vocabulary: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 20)]
"""Four times what any model has: noise is made by the row."""
ArenaName: TypeAlias = Annotated[str, Meta(max_length=23, pattern=r"\Alp-[0-9a-f]{20}\Z")]
"""A name that `segment_registry.create_segment` gives; nothing else from the wire is ever opened."""

Role = Literal["draft", "target", "prefill"]
Verification = Literal["coupled", "rejection"]


def plain(text: str) -> str:
    """`text` as a PlainText."""
    return "".join(c if c in "\t\n" or c.isprintable() else "?" for c in text[:4096])


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=str.lower):
    """Base of all messages; the tag is the class name in lower case."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what messages are made of."""


class Grammar(Part, frozen=True):
    """What generated text has to be: `before`, a JSON value that fits `schema`, `after`."""

    schema: Annotated[str, Meta(min_length=1, max_length=MAX_SCHEMA)]
    """A JSON schema, as JSON."""
    before: Annotated[str, Meta(max_length=256)] = ""
    after: Annotated[str, Meta(max_length=256)] = ""
    repeats: bool = False
    """All of it may come again, on a new line."""
    optional: bool = False
    """Any text may come first, and that may be all: only from the first `before` on it has to be so."""


class Sampling(Part, frozen=True, kw_only=True):
    """How the target turns logits into a token. Temperature 0 is greedy.

    The order is frequency and presence penalty (over what was generated on the node's own path), grammar,
    logit bias, repetition penalty (over the last `repetition_context` tokens of that path, the prompt
    included), top-k, top-p, min-p on the unscaled distribution, then division by temperature.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    logit_bias: Annotated[
        tuple[tuple[Token, Annotated[float, Meta(ge=-1000.0, le=1000.0)]], ...], Meta(max_length=1024)
    ] = ()
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    repetition_context: Annotated[int, Meta(ge=0, le=4096)] = 20
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    """Taken from a token's logit as often as it was generated."""
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    """Taken from it once, if it was generated."""
    grammar: Grammar | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)] | None = None
    """Tell each chosen token's probability, and those of so many of the most probable ones; None tells none."""
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    verification: Verification = "coupled"


class BestFirst(Part, frozen=True, tag="best_first"):
    """Grow the most probable unexpanded nodes: `width` a step, `fan` children each."""

    width: Annotated[int, Meta(ge=1, le=256)]
    fan: Annotated[int, Meta(ge=1, le=MAX_SUPPORT)]


class Chain(Part, frozen=True, tag="chain"):
    """Grow one chain of `depth` tokens under the root, then rest."""

    depth: Annotated[int, Meta(ge=1, le=256)]


class FanOut(Part, frozen=True, tag="fan_out"):
    """The published SSD speculation: a chain of `depth` tokens, then `fan[k]` guesses of the bonus
    token after k accepted ones (k = 0..depth), each continued by a chain of `depth` tokens.

    `saguaro` is the factor C in [0, 1] on the draft's top-fan probabilities (rejection mode only).
    """

    depth: Annotated[int, Meta(ge=1, le=256)]
    fan: Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_SUPPORT)], ...], Meta(min_length=2, max_length=257)]
    saguaro: Probability = 1.0


Plan: TypeAlias = BestFirst | Chain | FanOut


class Distribution(Part, frozen=True):
    """The draft distribution that the children of `node` were drawn from (rejection mode)."""

    node: WireNode
    tokens: Annotated[tuple[Token, ...], Meta(min_length=1, max_length=MAX_SUPPORT)]
    probabilities: Annotated[tuple[Probability, ...], Meta(min_length=1, max_length=MAX_SUPPORT)]


class Likelihood(Part, frozen=True):
    """How probable the target itself found a chosen token: the natural logarithm of its softmax over the bare logits,
    before penalties, grammar, bias, filters and temperature."""

    chosen: LogProbability
    best: Annotated[tuple[tuple[Token, LogProbability], ...], Meta(max_length=MAX_ALTERNATIVES)] = ()
    """The most probable tokens, best first, the chosen one perhaps among them."""


Likelihoods: TypeAlias = Annotated[tuple[Likelihood, ...], Meta(max_length=MAX_NODES)]


class KvReference(Part, frozen=True):
    """The KV of a sequence's first `tokens` tokens lies in this arena."""

    name: ArenaName
    tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]


class KvForm(Part, frozen=True):
    """What a model's keys, and equally its values, are like; see ArenaLayout."""

    layers: Annotated[int, Meta(ge=1, le=1024)]
    kv_heads: Annotated[int, Meta(ge=1, le=1024)]
    head_size: Annotated[int, Meta(ge=1, le=4096)]
    element: Annotated[int, Meta(ge=1, le=3)]
    """An ElementType."""


class Paced(Part, frozen=True, kw_only=True):
    """Forwards of one worker that were held to a device's pace."""

    forwards: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    overruns: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    """Forwards whose real work took longer than the device would."""
    seconds: Seconds = 0.0
    """What the device would have taken for all of them."""
    excess: Seconds = 0.0
    """What they took beyond that, late awakenings included."""

    def __add__(self, other: "Paced") -> "Paced":
        return Paced(
            forwards=self.forwards + other.forwards,
            overruns=self.overruns + other.overruns,
            seconds=self.seconds + other.seconds,
            excess=self.excess + other.excess,
        )


# Workers to the orchestrator ---------------------------------------------------------------------


class Hello(Message, frozen=True):
    """A worker that has loaded its model introduces itself."""

    role: Role
    engine: PlainText
    model: PlainText
    architecture: PlainText
    vocabulary: Vocabulary
    context: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]
    tokenizer: PlainText
    device: PlainText
    pid: Annotated[int, Meta(ge=0, lt=1 << 32)]
    kv: KvForm | None = None
    """Of a target or prefill worker whose KV can be handed on."""
    weights: PlainText = ""
    """Its model's fingerprint, then."""


class Prefilled(Message, frozen=True):
    """The target holds the KV of every committed token before the root of `round`.

    From a draft only after a Start that named an arena: what came of it.
    """

    sequence: WireSequence
    round: Round
    tokens: Count
    """Tokens that were evaluated for it (0 when all were already there)."""
    seconds: Seconds
    adopted: Count = 0
    """Tokens whose KV came from the arena that the Start named."""
    warning: PlainText = ""
    """Why that arena could not be used, if it could not: its tokens were evaluated instead."""
    paced: Paced | None = None


class KvOffer(Message, frozen=True):
    """An arena holds the KV of a sequence's first `tokens` tokens, for whoever starts with them.

    From a target: its checkpoint, as of now. From a prefill worker: all that Prefill asked for. From a draft:
    its own cache, for its next life; nobody else can use it.
    """

    sequence: WireSequence
    name: ArenaName
    tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]
    size: Annotated[int, Meta(ge=1, le=1 << 44)]
    """Bytes of shared memory that the arena takes."""
    seconds: Seconds
    """Time spent on it since the last offer of this sequence."""


class Grow(Message, frozen=True):
    """New tree nodes as flat parallel arrays: children of one parent in descending probability,
    parents before their children."""

    sequence: WireSequence
    round: Round
    """The draft's root when the step began; its nodes may outlive that root."""
    parents: Nodes
    tokens: Annotated[tuple[Token, ...], Meta(max_length=MAX_NODES)]
    probabilities: Annotated[tuple[Probability, ...], Meta(max_length=MAX_NODES)]
    """Conditional on the parent, as the draft believes."""
    evaluated: Count
    """Nodes that the draft's forward evaluated in this step (0 for a repeated publication)."""
    seconds: Seconds
    joint: Count = 0
    """Nodes of the whole forward, if it grew the trees of several sequences."""
    distributions: Annotated[tuple[Distribution, ...], Meta(max_length=MAX_NODES)] = ()
    paced: Paced | None = None
    """Of a paced worker: all its forwards since its last message; the same in a Verdict and a Prefilled."""

    def __post_init__(self) -> None:
        # msgspec turns this into a ValidationError where the message comes from elsewhere.
        if not len(self.parents) == len(self.tokens) == len(self.probabilities):
            raise ValueError("parents, tokens and probabilities of a Grow must be equally long")


class Verdict(Message, frozen=True):
    """What the target kept of a token tree, and the one token it added."""

    sequence: WireSequence
    round: Round
    path: Nodes
    """Accepted nodes below the root, top down."""
    bonus: Token
    seconds: Seconds
    """From the target's receipt of the Verify to the sending of this."""
    paced: Paced | None = None
    likelihoods: Likelihoods = ()
    """Of the path's tokens and of the bonus, if the sampling asks for them."""


class Fault(Message, frozen=True):
    """A worker can't do what it was told, or can't go on at all."""

    kind: Literal["lost", "fatal", "refused"]
    """lost: the sequence is unknown or out of step here, send Start; refused: this sequence can't be
    served; fatal: the worker ends."""
    text: PlainText
    sequence: WireSequence | None = None
    nodes: Annotated[int, Meta(ge=0, le=MAX_NODES)] | None = None
    """Of a tree that a target refuses: how many it has below its root. None: not a tree was refused."""


class Pong(Message, frozen=True):
    """Answer to Ping, between two units of work."""

    sent: Moment
    clock: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    """Nanoseconds on the worker's clock, the one of its spans; 0 from a worker that tells none."""


# The orchestrator to workers ---------------------------------------------------------------------


class Start(Message, frozen=True):
    """Serve this sequence from here on; its last token is the root."""

    sequence: WireSequence
    round: Round
    tokens: Annotated[tuple[Token, ...], Meta(min_length=1, max_length=MAX_CONTEXT)]
    root: WireNode
    sampling: Sampling
    plan: Plan | None = None
    """How to grow; None for a target."""
    vocabulary: Vocabulary | None = None
    """The target's, for a draft: tokens at or above it are never drafted. None if it is the draft's own."""
    adopt: KvReference | None = None
    """Where a target, or a draft that was restarted, finds the KV of the first tokens, so that it need not evaluate
    them."""
    prompt: Count = 0
    """How many of the tokens are the prompt: the others were generated."""
    ends: Annotated[tuple[Token, ...], Meta(max_length=MAX_ENDS)] = ()
    """End-of-sequence tokens: what a grammar allows when it is fulfilled."""


class Prefill(Message, frozen=True):
    """Evaluate these tokens and offer their KV."""

    sequence: WireSequence
    tokens: Annotated[tuple[Token, ...], Meta(min_length=1, max_length=MAX_CONTEXT)]
    question: Round = 0
    """Comes back with every block of a worker that sends its KV over a network."""


class KvRelease(Message, frozen=True):
    """This arena is given up: let go of it, and keep no other one for its sequence."""

    name: ArenaName


class Reroot(Message, frozen=True):
    """The target spoke: `tokens` (accepted, then bonus) follow the old root at `position`."""

    sequence: WireSequence
    round: Round
    position: Position
    tokens: TreeTokens
    root: WireNode
    missed: bool
    """The cache has no child of the new root: publish what there is again."""
    plan: Plan | None = None
    """A new plan, or None to keep the present one."""


class Verify(Message, frozen=True):
    """Evaluate this tree in one forward. Entry 0 is the root; parents come before children."""

    sequence: WireSequence
    round: Round
    root: WireNode
    position: Position
    """Absolute position of the root."""
    tokens: TreeTokens
    parents: Annotated[tuple[Annotated[int, Meta(ge=-1, lt=MAX_NODES)], ...], Meta(max_length=MAX_NODES)]
    """Index of each entry's parent; -1 for the root alone."""
    distributions: Annotated[tuple[Distribution, ...], Meta(max_length=MAX_NODES)] = ()


class Forest(Message, frozen=True):
    """Evaluate the trees of several sequences in one forward. Each of them is answered as though it stood alone."""

    trees: Annotated[tuple[Verify, ...], Meta(min_length=2, max_length=MAX_TREES)]
    """One a sequence."""


class Stop(Message, frozen=True):
    """Forget this sequence."""

    sequence: WireSequence


class Ping(Message, frozen=True):
    """Are you there? `sent` comes back unchanged."""

    sent: Moment


class Shutdown(Message, frozen=True):
    """End in good order."""


# Clients and the orchestrator --------------------------------------------------------------------


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


class State(Message, frozen=True):
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


class Piece(Message, frozen=True):
    """More text. A token whose text is still incomplete arrives with the text so far."""

    request: ShortText
    text: Annotated[str, Meta(max_length=1 << 20)]
    tokens: Annotated[tuple[Token, ...], Meta(max_length=MAX_NODES)]
    hit: bool | None = None
    """Whether the next speculation was there already; None where there is no such thing."""
    likelihoods: Likelihoods = ()
    """Of each of the tokens, if they were asked for."""


class Pace(Part, frozen=True, kw_only=True):
    """How well a run kept to the pace of the device that it stands for."""

    profile: ShortText
    forwards: int
    overruns: int
    """Forwards whose real work took longer than the device would."""
    stretch: float
    """Seconds beyond the device's, late awakenings included, as a share of the device's."""
    valid: bool
    """At most 1% of the forwards overran; figures of an invalid run say nothing of the device."""


class Statistics(Part, frozen=True, kw_only=True):
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


FromWorker: TypeAlias = Hello | Prefilled | KvOffer | Grow | Verdict | Fault | Pong
ToWorker: TypeAlias = Start | Prefill | Reroot | Verify | Forest | KvRelease | Stop | Ping | Shutdown
FromClient: TypeAlias = Submit | Cancel | Inquire
ToClient: TypeAlias = State | Piece | Done | Refused
