"""How a token is chosen, and how probable the target found it: parts of messages to and from workers and clients."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from protocol.ineffective import Facts, Ineffective
from protocol.messages.base import MAX_ALTERNATIVES, MAX_NODES, LogProbability, MessagePart, Token
from protocol.messages.grammar import Grammar, Thought

Temperature: TypeAlias = Annotated[float, Meta(ge=0.0, le=100.0, description="0 takes the most probable token.")]
TopP: TypeAlias = Annotated[
    float, Meta(gt=0.0, le=1.0, description="Keeps the most probable tokens that together reach this probability.")
]
TopK: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31, description="0 keeps all tokens.")]
MinP: TypeAlias = Annotated[
    float, Meta(ge=0.0, le=1.0, description="Keeps tokens of at least this share of the highest probability.")
]


def coldest(facts: Facts) -> bool:
    """Whether every temperature is known to be 0."""
    temperature: float | tuple[float, ...] | None = facts.get("temperature")
    return set(temperature) == {0} if isinstance(temperature, tuple) else temperature == 0


AT_ZERO = Ineffective("at temperature 0 the most probable token is taken", coldest)
_COLDEST = 1e-6
"""Temperatures below it are 0."""


class ModelSampling(MessagePart, frozen=True, kw_only=True):
    """A target's own values, for requests that leave these fields open. Without any, the most probable token."""

    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0


class SamplingFields(MessagePart, frozen=True, kw_only=True):
    """The sampling fields that mean the same on the wire and to users.

    `SamplingParams`, the command line's options, HTTP bodies and presets are derived from this struct: types, ranges
    and defaults stand in this module alone. A description is the help text of the option. None in a field of
    `ModelSampling` takes the target's own value.
    """

    temperature: Temperature | None = None
    top_p: Annotated[TopP | None, AT_ZERO] = None
    top_k: Annotated[TopK | None, AT_ZERO] = None
    min_p: Annotated[MinP | None, AT_ZERO] = None
    repetition_penalty: Annotated[
        float, Meta(gt=0.0, le=100.0, description="Above 1, makes recent tokens less probable.")
    ] = 1.0
    repetition_context: Annotated[
        int,
        Meta(ge=0, le=4096, description="Tokens before the next one that the repetition penalty counts."),
        Ineffective("there is no repetition penalty", repetition_penalty=1.0),
    ] = 20
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0, description="As OpenAI has it.")] = 0.0
    """Taken from a token's logit for each time the token was generated."""
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0, description="As OpenAI has it.")] = 0.0
    """Taken once from the logit of a token that was generated."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)] | None = None
    """Report the log-probability of each chosen token, and of this many of the most probable ones. None reports
    nothing."""


class RequestedSampling(SamplingFields, frozen=True, kw_only=True):
    """What a request asks for; the orchestrator makes it a `Sampling`."""

    logit_bias: Annotated[
        tuple[tuple[Token, Annotated[float, Meta(ge=-1000.0, le=1000.0)]], ...], Meta(max_length=1024)
    ] = ()
    grammar: Grammar | None = None
    closed_thought: Thought | None = None
    """While this thought is open, its end is taken in place of an end token."""
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    prompt_logprobs: bool = False
    """Report the log-probabilities of the prompt's tokens too, beside as many others as `logprobs` says. The whole
    prompt is then evaluated, whatever KV there is."""

    def resolved(self, own: ModelSampling) -> "Sampling":
        """With the target's `own` values where the request has none."""
        fields = msgspec.structs.asdict(self)
        given = {name: value for name, value in fields.items() if value is not None}
        sampling = Sampling(**{**msgspec.structs.asdict(own), **given})
        # Logits divided by less would be infinite in 32 bits, long after the most probable token has all probability.
        return msgspec.structs.replace(sampling, temperature=0.0) if sampling.temperature < _COLDEST else sampling


class Sampling(RequestedSampling, frozen=True, kw_only=True):
    """How the target turns logits into a token. No value is open.

    The order is frequency and presence penalty (over what was generated on the node's own path), logit bias, end of an
    open thought, grammar, repetition penalty (over the last `repetition_context` tokens of that path, the prompt
    included), top-k, top-p, min-p on the unscaled distribution, then division by temperature.
    """

    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always chosen, without noise."""
        return self.temperature == 0


class TokenLogprob(MessagePart, frozen=True):
    """How probable the target found a chosen token: the natural logarithm of the softmax over the model's own logits,
    before penalties, grammar, bias, filters and temperature."""

    chosen: LogProbability
    best: Annotated[tuple[tuple[Token, LogProbability], ...], Meta(max_length=MAX_ALTERNATIVES)] = ()
    """The most probable tokens, best first. The chosen token may be among them."""


TokenLogprobs: TypeAlias = Annotated[tuple[TokenLogprob, ...], Meta(max_length=MAX_NODES)]
