"""Messages between the orchestrator and its workers. Each union at the end names who may say what to whom."""

from typing import Annotated, Literal, NamedTuple, TypeAlias

from msgspec import Meta

from protocol.messages.base import (
    MAX_CONTEXT,
    MAX_ENDS,
    MAX_NODES,
    MAX_TREES,
    ArenaName,
    Count,
    Message,
    MessagePart,
    Moment,
    Nodes,
    PlainText,
    Position,
    Probability,
    Role,
    Round,
    Seconds,
    Token,
    TreeTokens,
    Vocabulary,
    WireNode,
    WireSequence,
)
from protocol.messages.plans import Distribution, GrowthPlan
from protocol.messages.sampling import Likelihoods, Sampling

MAX_PAYLOAD = 1 << 19
"""Bytes of the raw frame. CURVE adds to them, and the whole has to stay under a worker's largest frame."""


class KvReference(MessagePart, frozen=True):
    """The KV of a sequence's first `tokens` tokens lies in this arena."""

    name: ArenaName
    tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]


class KvForm(MessagePart, frozen=True):
    """What a model's keys, and equally its values, are like; see ArenaLayout."""

    layers: Annotated[int, Meta(ge=1, le=1024)]
    kv_heads: Annotated[int, Meta(ge=1, le=1024)]
    head_size: Annotated[int, Meta(ge=1, le=4096)]
    element: Annotated[int, Meta(ge=1, le=3)]
    """An ElementType."""


class Paced(MessagePart, frozen=True, kw_only=True):
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


class KvBlock(Message, frozen=True):
    """By a prefill worker of another machine: rows of one layer's keys or values, for an arena there.

    Blocks come in order: all layers of some rows, keys of every layer and then values, before the next rows.
    """

    sequence: WireSequence
    question: Round
    """Of the Prefill that it answers."""
    begin: Count
    """Token that the first row belongs to."""
    rows: Annotated[int, Meta(ge=1, le=MAX_PAYLOAD)]
    layer: Annotated[int, Meta(ge=0, lt=2048)]
    """Keys of all layers first."""


class Shipment(NamedTuple):
    """A block and its bytes, (kv heads, rows, head size) of the arena's element type."""

    block: KvBlock
    payload: bytes


# The orchestrator to workers ---------------------------------------------------------------------


class Start(Message, frozen=True):
    """Serve this sequence from here on; its last token is the root."""

    sequence: WireSequence
    round: Round
    tokens: Annotated[tuple[Token, ...], Meta(min_length=1, max_length=MAX_CONTEXT)]
    root: WireNode
    sampling: Sampling
    plan: GrowthPlan | None = None
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
    plan: GrowthPlan | None = None
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


FromWorker: TypeAlias = Hello | Prefilled | KvOffer | Grow | Verdict | Fault | Pong
ToWorker: TypeAlias = Start | Prefill | Reroot | Verify | Forest | KvRelease | Stop | Ping | Shutdown
