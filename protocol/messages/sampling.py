"""How a token is chosen, and how probable the target found it: parts of messages to and from workers and clients."""

from typing import Annotated, TypeAlias

from msgspec import Meta

from protocol.messages.base import (
    MAX_ALTERNATIVES,
    MAX_NODES,
    MAX_SCHEMA,
    LogProbability,
    MessagePart,
    Token,
    Verification,
)


class Grammar(MessagePart, frozen=True):
    """What generated text has to be: `before`, a JSON value that fits `schema`, `after`."""

    schema: Annotated[str, Meta(min_length=1, max_length=MAX_SCHEMA)]
    """A JSON schema, as JSON."""
    before: Annotated[str, Meta(max_length=256)] = ""
    after: Annotated[str, Meta(max_length=256)] = ""
    repeats: bool = False
    """All of it may come again, on a new line."""
    optional: bool = False
    """Any text may come first, and that may be all: only from the first `before` on it has to be so."""


class Sampling(MessagePart, frozen=True, kw_only=True):
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


class Likelihood(MessagePart, frozen=True):
    """How probable the target itself found a chosen token: the natural logarithm of its softmax over the bare logits,
    before penalties, grammar, bias, filters and temperature."""

    chosen: LogProbability
    best: Annotated[tuple[tuple[Token, LogProbability], ...], Meta(max_length=MAX_ALTERNATIVES)] = ()
    """The most probable tokens, best first, the chosen one perhaps among them."""


Likelihoods: TypeAlias = Annotated[tuple[Likelihood, ...], Meta(max_length=MAX_NODES)]
