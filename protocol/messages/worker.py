"""Messages between the orchestrator and its workers. The unions at the end list the messages of each direction."""

from itertools import pairwise
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from protocol.messages.base import (
    MAX_CONTEXT,
    MAX_EOS_TOKENS,
    MAX_NODES,
    MAX_STEPS,
    MAX_TREES,
    ContextCosts,
    Costs,
    Count,
    Deviation,
    Level,
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
    StartUp,
    Token,
    TreeTokens,
    Vocabulary,
    WireNode,
    WireRequest,
)
from protocol.messages.features import FeatureForm, Features, FeaturesTaken, Tap, Taps
from protocol.messages.kv import KvForm, KvOffer, KvReference, KvRelease
from protocol.messages.plans import GrowthPlan
from protocol.messages.sampling import Sampling, TokenLogprobs


class Paced(MessagePart, frozen=True, kw_only=True):
    """Forwards of a worker that a device profile paces."""

    forwards: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    overruns: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    """Forwards whose real work took longer than the device would."""
    seconds: Seconds = 0.0
    """Time that the device would have taken for all forwards."""
    excess: Seconds = 0.0
    """Time beyond that, late awakenings included."""

    def __add__(self, other: "Paced") -> "Paced":
        return Paced(
            forwards=self.forwards + other.forwards,
            overruns=self.overruns + other.overruns,
            seconds=self.seconds + other.seconds,
            excess=self.excess + other.excess,
        )


# Workers to the orchestrator ---------------------------------------------------------------------


class Hello(Message, frozen=True):
    """A worker has loaded its model."""

    role: Role
    engine: PlainText
    model: PlainText
    architecture: PlainText
    vocabulary: Vocabulary
    context: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]
    tokenizer_fingerprint: PlainText
    """`vocabulary_fingerprint` of the model's tokenizer; empty if the worker's tokens are always the target's."""
    device: PlainText
    pid: Annotated[int, Meta(ge=0, lt=1 << 32)]
    kv: KvForm | None = None
    """From a target or prefill worker whose KV can be adopted."""
    model_fingerprint: PlainText = ""
    """Of the weights that this KV is computed with; empty without `kv`."""
    costs: Costs = ()
    """Seconds of a forward by its tokens, by rising tokens, as measured while loading; empty if nothing was measured.

    Of a target: forwards over token trees. Of a draft: growth steps."""
    context_costs: ContextCosts = ()
    """Of a target: seconds that 1,000 tokens of context add to a forward, by rising tokens; empty if that was not
    measured."""
    level: Level = "tree"
    """Of a target: the trees that it verifies."""
    level_reason: PlainText = ""
    """Why it is no higher level, with the deviation; empty at the highest."""
    deviation: Deviation = 0.0
    """Of a target: the largest of its logits at this level from those of single tokens, in standard deviations, as
    found while loading."""
    joint_deviation: Deviation | None = None
    """Of a target: the same of rows in a forward with other sequences, from the rows alone. None: not compared."""
    batch_dependent: bool = False
    """Of a target: that is more than rounding, so that a request's tokens may depend on the others in its forward."""
    taps: Taps | None = None
    """Of a target: the features that it can record; None if it records none."""
    features: FeatureForm | None = None
    """Of a draft: the features of the target that it reads; None if it reads tokens alone."""
    block: Annotated[int, Meta(ge=1, le=MAX_STEPS)] = 1
    """Of a draft: tokens behind one another that a forward guesses, and so the growth steps that it serves."""
    start: StartUp = ()
    """Of a target: parts of the time until this message."""

    def __post_init__(self) -> None:
        measured = *pairwise(self.costs), *pairwise(self.context_costs)
        if any(wider <= width for (width, _), (wider, _) in measured):
            raise ValueError("the widths of a Hello's costs must rise")


class Prefilled(Message, frozen=True):
    """The target holds the KV of every committed token before the root of `round`.

    A draft sends it only where it goes on with KV that it has read for another sequence.
    """

    request: WireRequest
    round: Round
    tokens: Count
    """Tokens that were evaluated for it (0 if all of them had KV)."""
    seconds: Seconds
    adopted: Count = 0
    """Tokens whose KV came from the arena that the Start named; of a draft, from another sequence."""
    warning: PlainText = ""
    """Why that arena could not be adopted; empty if it could. Its tokens were evaluated instead."""
    paced: Paced | None = None


class Lowered(Message, frozen=True):
    """A forward of the target failed, so it verifies less from now on. It has lost all sequences."""

    level: Level
    reason: PlainText


class CacheOff(Message, frozen=True):
    """The target keeps no more KV on disk and finds none there, until it is started again."""

    reason: PlainText


class KvCut(Message, frozen=True):
    """A worker's memory does not hold the KV of an ended sequence whole: a next turn evaluates the rest again."""

    kept: Count
    """Its first tokens that are kept."""
    tokens: Count
    memory: Annotated[int, Meta(ge=0, le=1 << 48)]
    """Bytes that would hold all of it."""


class Prefilling(Message, frozen=True):
    """The target has read a part of the committed tokens before the root of `round`."""

    request: WireRequest
    round: Round
    tokens: Count
    """Tokens that have KV now."""


class PromptLogprobs(Message, frozen=True):
    """How probable the target found tokens of the prompt, if the sampling asks for it. Sent before the Prefilled, in
    the prompt's order."""

    request: WireRequest
    round: Round
    first: Count
    """Tokens of the prompt that were told before: 0 stands for the prompt's second token, as nothing precedes the
    first one."""
    token_logprobs: TokenLogprobs


class Grow(Message, frozen=True):
    """New tree nodes as flat parallel arrays: children of one parent in descending probability,
    parents before their children."""

    request: WireRequest
    round: Round
    """The round of the draft's root when the step began. The nodes may survive that root."""
    parents: Nodes
    tokens: Annotated[tuple[Token, ...], Meta(max_length=MAX_NODES)]
    probabilities: Annotated[tuple[Probability, ...], Meta(max_length=MAX_NODES)]
    """Conditional on the parent, as the draft claims."""
    evaluated: Count
    """Nodes that the draft's forward evaluated in this step (0 for a repeated publication)."""
    seconds: Seconds
    forward_nodes: Count = 0
    """Nodes of the whole forward, if it grew the trees of several sequences; else 0."""
    paced: Paced | None = None
    """From a paced worker: all its forwards since its last message that has this field."""
    staleness: Count = 0
    """Of a draft that reads features: committed tokens before the root whose features it did not have in this step."""

    def __post_init__(self) -> None:
        # msgspec turns this into a ValidationError when it decodes a message.
        if not len(self.parents) == len(self.tokens) == len(self.probabilities):
            raise ValueError("parents, tokens and probabilities of a Grow must be equally long")


class Verdict(Message, frozen=True):
    """The target's answer to a Verify: the accepted path of the token tree, and the bonus token."""

    request: WireRequest
    round: Round
    path: Nodes
    """Accepted nodes below the root, top down."""
    bonus: Token
    seconds: Seconds
    """From the target's receipt of the Verify to the sending of this."""
    paced: Paced | None = None
    token_logprobs: TokenLogprobs = ()
    """Of the path's tokens and of the bonus, if the sampling asks for log-probabilities."""
    root_alone: bool = False
    """The tree had nodes, and they were not evaluated: see `plain_next` of Verify."""
    saving: Seconds = 0.0
    """Spent on saving KV of any sequence since the Verdict or Prefilled before."""


class Unfit(Message, frozen=True):
    """So few of a trained draft's guesses are right that it was probably made for another target, or is read
    wrongly. Sent once."""

    guesses: Annotated[int, Meta(ge=1, le=1 << 20)]
    right: Count


class Fault(Message, frozen=True):
    """A worker can't carry out a message, or can't go on at all."""

    kind: Literal["lost", "fatal", "refused"]
    """lost: the sequence is unknown or at another round here, send Start; refused: this sequence, or this tree, can't
    be served; fatal: the worker ends."""
    text: PlainText
    request: WireRequest | None = None
    nodes: Annotated[int, Meta(ge=0, le=MAX_NODES)] | None = None
    """If a target refuses a tree: the tree's nodes below the root. None if no tree is refused."""


class Pong(Message, frozen=True):
    """Answer to Ping, between two units of work."""

    sent: Moment


# The orchestrator to workers ---------------------------------------------------------------------


class Start(Message, frozen=True):
    """Serve this sequence; its last token is the root."""

    request: WireRequest
    round: Round
    tokens: Annotated[tuple[Token, ...], Meta(min_length=1, max_length=MAX_CONTEXT)]
    root: WireNode
    sampling: Sampling
    plan: GrowthPlan | None = None
    """How to grow; None for a target."""
    vocabulary: Vocabulary | None = None
    """For a draft: the target's vocabulary size. Tokens at or above it are never drafted. None if it is the draft's."""
    adopt: KvReference | None = None
    """For a target: an arena with the KV of the first tokens, which may be adopted."""
    prompt_tokens: Count = 0
    """How many of the tokens are the prompt. The others were generated."""
    shared_prefix: Count = 0
    """How many of the first tokens other conversations begin with too; 0 if that is not known."""
    eos_tokens: Annotated[tuple[Token, ...], Meta(max_length=MAX_EOS_TOKENS)] = ()
    """End-of-sequence tokens: a grammar allows them once it is fulfilled."""


class Prefill(Message, frozen=True):
    """Evaluate these tokens and offer their KV, for a prefill worker."""

    request: WireRequest
    tokens: Annotated[tuple[Token, ...], Meta(min_length=1, max_length=MAX_CONTEXT)]
    attempt: Round = 0
    """A worker that sends its KV over a network repeats it in every KvBlock."""


class Reroot(Message, frozen=True):
    """A verdict was committed: `tokens` (accepted, then bonus) follow the old root at `position`."""

    request: WireRequest
    round: Round
    position: Position
    tokens: TreeTokens
    root: WireNode
    missed: bool
    """The orchestrator's tree has no child of the new root: publish the draft's nodes again."""
    plan: GrowthPlan | None = None
    """A new plan, or None to keep the present one."""
    anew: bool = False
    """Drop all nodes and grow again from the root, once its features are there. `missed` is set."""


class Extend(Message, frozen=True):
    """A draft whose plan has `steps` may take up to so many steps below the root of `round`."""

    request: WireRequest
    round: Round
    steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)]


class Verify(Message, frozen=True):
    """Evaluate this tree in one forward. Entry 0 is the root; parents come before children."""

    request: WireRequest
    round: Round
    root: WireNode
    position: Position
    """Absolute position of the root."""
    tokens: TreeTokens
    parents: Annotated[tuple[Annotated[int, Meta(ge=-1, lt=MAX_NODES)], ...], Meta(max_length=MAX_NODES)]
    """Index of each entry's parent; -1 for the root alone."""
    plain_next: bool = False
    """The sequence's next round is expected to verify the root alone: the target may begin that forward before its
    Verify, and answers with it whatever that tree is."""


class Forest(Message, frozen=True):
    """Evaluate the trees of several sequences in one forward. Each tree is answered like a Verify."""

    trees: Annotated[tuple[Verify, ...], Meta(min_length=2, max_length=MAX_TREES)]
    """At most one for each sequence."""


class Stop(Message, frozen=True):
    """End this sequence."""

    request: WireRequest


class Ping(Message, frozen=True):
    """Heartbeat. The Pong repeats `sent`."""

    sent: Moment


class Cores(Message, frozen=True):
    """Compute on these processor cores from now on."""

    cores: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 16)], ...], Meta(min_length=1, max_length=4096)]


class Shutdown(Message, frozen=True):
    """End the worker process."""


FromWorker: TypeAlias = (
    Hello
    | Lowered
    | CacheOff
    | KvCut
    | Prefilling
    | PromptLogprobs
    | Prefilled
    | KvOffer
    | Grow
    | Verdict
    | Features
    | Unfit
    | Fault
    | Pong
)
ToWorker: TypeAlias = (
    Start
    | Prefill
    | Reroot
    | Extend
    | Features
    | Verify
    | Forest
    | Tap
    | FeaturesTaken
    | KvRelease
    | Stop
    | Ping
    | Cores
    | Shutdown
)
