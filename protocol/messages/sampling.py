"""How a token is chosen, and how probable the target found it: parts of messages to and from workers and clients."""

from typing import Annotated, TypeAlias

from msgspec import Meta

from protocol.messages.base import MAX_ALTERNATIVES, MAX_NODES, LogProbability, MessagePart, Token, Verification
from protocol.messages.grammar import Grammar


class SamplingFields(MessagePart, frozen=True, kw_only=True):
    """The sampling fields that mean the same on the wire and to users.

    `SamplingParams`, the command line's options, HTTP bodies and presets are derived from this struct: types, ranges
    and defaults stand here alone. A description is the help text of the option.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=100.0, description="0 takes the most probable token.")] = 0.0
    top_p: Annotated[
        float, Meta(gt=0.0, le=1.0, description="Keeps the most probable tokens that together reach this probability.")
    ] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31, description="0 keeps all tokens.")] = 0
    min_p: Annotated[
        float, Meta(ge=0.0, le=1.0, description="Keeps tokens of at least this share of the highest probability.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, Meta(gt=0.0, le=100.0, description="Above 1, makes recent tokens less probable.")
    ] = 1.0
    repetition_context: Annotated[
        int, Meta(ge=0, le=4096, description="Tokens before the next one that the repetition penalty counts.")
    ] = 20
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0, description="As OpenAI has it.")] = 0.0
    """Taken from a token's logit for each time the token was generated."""
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0, description="As OpenAI has it.")] = 0.0
    """Taken once from the logit of a token that was generated."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)] | None = None
    """Report the log-probability of each chosen token, and of this many of the most probable ones. None reports
    nothing."""
    verification: Verification = "coupled"

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always chosen, without noise."""
        return self.temperature == 0


class Sampling(SamplingFields, frozen=True, kw_only=True):
    """How the target turns logits into a token.

    The order is frequency and presence penalty (over what was generated on the node's own path), grammar,
    logit bias, repetition penalty (over the last `repetition_context` tokens of that path, the prompt
    included), top-k, top-p, min-p on the unscaled distribution, then division by temperature.
    """

    logit_bias: Annotated[
        tuple[tuple[Token, Annotated[float, Meta(ge=-1000.0, le=1000.0)]], ...], Meta(max_length=1024)
    ] = ()
    grammar: Grammar | None = None
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    prompt_logprobs: bool = False
    """Report the log-probabilities of the prompt's tokens too, beside as many others as `logprobs` says. The whole
    prompt is then evaluated, whatever KV there is."""


class Likelihood(MessagePart, frozen=True):
    """How probable the target found a chosen token: the natural logarithm of the softmax over the model's own logits,
    before penalties, grammar, bias, filters and temperature."""

    chosen: LogProbability
    best: Annotated[tuple[tuple[Token, LogProbability], ...], Meta(max_length=MAX_ALTERNATIVES)] = ()
    """The most probable tokens, best first. The chosen token may be among them."""


Likelihoods: TypeAlias = Annotated[tuple[Likelihood, ...], Meta(max_length=MAX_NODES)]
