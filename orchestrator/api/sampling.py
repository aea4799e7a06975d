"""What a caller may ask of a generation, checked before it is sent: its fields, those that are numbers, and presets."""

import json
import secrets
from collections.abc import Container, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Self, get_args, get_type_hints

import msgspec
from msgspec import Meta

from orchestrator.api.validation import out_of_range
from protocol.errors import InputError
from protocol.messages.base import MAX_CONTEXT
from protocol.messages.client import Submit, ThoughtText
from protocol.messages.grammar import Grammar, Thought
from protocol.messages.sampling import AT_ZERO, ModelSampling, RequestedSampling, Sampling, SamplingFields


class SamplingParams(SamplingFields, frozen=True, kw_only=True):
    """How to choose tokens, and when to stop. Equal parameters and seed give equal tokens.

    `SamplingFields` has the other fields, with their ranges. `submit` checks them. A temperature, top_p, top_k or min_p
    of None is the target's own: `Client.state().sampling`.
    """

    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
    """Added to the logits of these tokens."""
    json_schema: Mapping[str, Any] | str | None = None
    """The text will be JSON that fits this schema, for instance {"type": "object"}. Enforced while decoding."""
    grammar: Grammar | None = None
    """A schema with text around it. Give either this or `json_schema`."""
    closed_thought: Thought | None = None
    """While this thought is open, its end is taken in place of an end token."""
    prompt_logprobs: bool = False
    """Report the log-probabilities of the prompt's tokens too: `Result.prompt_token_logprobs`. No KV is reused then."""
    seed: Annotated[int | None, AT_ZERO] = None
    """None draws a seed; the result has it. A request with a seed shares no forward where that may change its tokens,
    as `doctor --target` says."""
    max_tokens: int | None = 256
    """None generates until an end token, or until the target's context is full."""
    stop: str | Sequence[str] | None = ()
    shown: Sequence[int] = ()
    """Special tokens whose text is part of the result's. Without, special tokens have no text."""
    marked: Sequence[int] = ()
    """Tokens whose text in the result comes behind U+FDD0, which tells it from the same text in other tokens."""
    thought: ThoughtText | None = None
    """Where no stop string is looked for; None looks for them everywhere."""
    shared_prefix: int = 0
    """The prompt's first tokens that other conversations begin with too (instructions, tools). Models with windows or
    recurrent states remember a way back to them. It changes no token."""
    background: bool = False
    """Nobody waits for the answer: the request yields to others. It changes no token."""
    draft_tokens: int | None = None
    """K of this request under the strategies sd and ssd, 1 to 64; None takes the pipeline's. It
    changes no token."""

    @classmethod
    def preset(cls, name: str, **fields: Any) -> Self:
        """The values of `--preset NAME`, and `fields` beside or instead of them. Raises InputError for another name."""
        if name not in PRESETS:
            raise InputError(f"There is no preset called {name!r}: choose from {', '.join(PRESETS)}.")
        return cls(**{**PRESETS[name], **fields})

    def submit(self, request: str, prompt: str | Sequence[int]) -> Submit:
        """The message that asks for it. Raises InputError for a value out of range, naming it."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        body = {
            "type": "submit",
            "request": request,
            "prompt": prompt if isinstance(prompt, str) else None,
            "tokens": None if isinstance(prompt, str) else tuple(prompt),
            "sampling": msgspec.to_builtins(self._sampling()),
            "max_tokens": MAX_CONTEXT if self.max_tokens is None else self.max_tokens,
            "stop": stops,
            "draft_tokens": self.draft_tokens,
            "shown": tuple(self.shown),
            "marked": tuple(self.marked),
            "thought": None if self.thought is None else msgspec.to_builtins(self.thought),
            "shared_prefix": self.shared_prefix,
            "background": self.background,
            "seeded": self.seed is not None,
        }
        try:
            submit = msgspec.convert(body, Submit)
        except msgspec.ValidationError as error:
            raise out_of_range(error) from error
        if submit.sampling.grammar is not None:
            # Imports more than most clients need.
            from orchestrator.machine.grammar_check import require_enforceable

            require_enforceable(submit.sampling.grammar)
        return submit

    def _grammar(self) -> Grammar | None:
        if self.json_schema is None:
            return self.grammar
        if self.grammar is not None:
            raise InputError("Give either json_schema or grammar, not both.")
        if isinstance(self.json_schema, str):
            return Grammar(self.json_schema)
        try:
            return Grammar(json.dumps(self.json_schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"json_schema is not JSON ({error}).") from error

    def _sampling(self) -> RequestedSampling:
        shared = {name: getattr(self, name) for name in SamplingFields.__struct_fields__}
        return RequestedSampling(
            **shared,
            logit_bias=tuple(sorted(self.logit_bias.items())),
            grammar=self._grammar(),
            closed_thought=self.closed_thought,
            prompt_logprobs=self.prompt_logprobs,
            seed=secrets.randbelow(1 << 32) if self.seed is None else self.seed,
        )


class NumberField(NamedTuple):
    """One field of `SamplingFields` that holds a number."""

    name: str
    annotation: Any
    """The type with its range, as msgspec checks it."""
    kind: type[float] | type[int]
    limits: Meta
    plain: float
    """The value that changes nothing."""

    @property
    def of_model(self) -> bool:
        """Whether a target has a value of its own, which holds where no other is given."""
        return self.name in ModelSampling.__struct_fields__

    @property
    def default(self) -> float | None:
        """None takes the target's own."""
        return None if self.of_model else self.plain

    @property
    def option(self) -> str:
        """The name of its option on the command line."""
        return f"--{self.name.replace('_', '-')}"


def number_fields(excluded: Container[str]) -> list[NumberField]:
    """All fields of `SamplingFields` in its order, but the excluded ones. Each surface (command line, HTTP, presets)
    excludes by name and gives a reason, so that a new field reaches all of them."""
    hints = get_type_hints(Sampling, include_extras=True)
    defaults = {field.name: field.default for field in msgspec.structs.fields(Sampling)}
    found = []
    for name in SamplingFields.__struct_fields__:
        if name not in excluded:
            kind, limits, *_ = get_args(hints[name])
            found.append(NumberField(name, hints[name], kind, limits, defaults[name]))
    return found


NOT_PRESET = {
    "repetition_context": "only matters with a repetition penalty, which no preset sets",
    "frequency_penalty": "no preset penalises what was generated",
    "presence_penalty": "no preset penalises what was generated",
    "logprobs": "reports, and changes no token",
}
"""Fields of `SamplingFields` that a preset does not set, and why."""
PRESET_FIELDS = number_fields(NOT_PRESET)
_PLAIN = {field.name: field.plain for field in PRESET_FIELDS}
UNFILTERED: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""The target's whole distribution, for measurements, whatever its own values are."""
_BALANCED = _PLAIN | {"temperature": 0.7, "top_p": 0.95}
PRESETS: dict[str, dict[str, Any]] = {
    "default": _BALANCED,
    "greedy": _PLAIN,
    "conservative": _PLAIN | {"temperature": 0.3, "top_p": 0.9},
    "balanced": _BALANCED,
    "creative": _PLAIN | {"temperature": 1.0, "min_p": 0.05},
}
"""Customary values, not tuned for any model. The tokens are the target's own with any of them; a draft guesses fewer
tokens at a higher temperature."""
