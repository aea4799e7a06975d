"""What a client may ask of a generation, checked before it is sent."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from orchestrator.api.validation import out_of_range
from protocol.errors import InputError
from protocol.messages.base import Verification
from protocol.messages.client import Submit
from protocol.messages.sampling import Grammar, Sampling


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens, and when to stop. Equal parameters and seed give equal tokens."""

    temperature: float = 0.0
    """0 takes the most probable token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    repetition_context: int = 20
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time it was generated."""
    presence_penalty: float = 0.0
    """Taken from it once it was generated."""
    json_schema: Mapping[str, Any] | str | None = None
    """The text has to be JSON that fits this schema, for instance {"type": "object"}; enforced while decoding."""
    grammar: Grammar | None = None
    """The same with text around it; not both."""
    logprobs: int | None = None
    """Tell each token's log-probability, and those of so many of the most probable tokens (0 to 20)."""
    seed: int | None = None
    """None draws one; the result tells which."""
    verification: Verification = "coupled"
    max_tokens: int = 256
    stop: str | Sequence[str] = ()

    def submit(self, request: str, prompt: str | Sequence[int]) -> Submit:
        """The message that asks for it. Raises InputError for a value out of range, naming it."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        body = {
            "type": "submit",
            "request": request,
            "prompt": prompt if isinstance(prompt, str) else None,
            "tokens": None if isinstance(prompt, str) else tuple(prompt),
            "sampling": msgspec.to_builtins(self._sampling()),
            "max_tokens": self.max_tokens,
            "stop": stops,
        }
        try:
            submit = msgspec.convert(body, Submit)
        except msgspec.ValidationError as error:
            raise out_of_range(error) from error
        if submit.sampling.grammar is not None:
            # Imports more than most clients need.
            from protocol.sampling.grammar import require_enforceable

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

    def _sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            logit_bias=tuple(sorted(self.logit_bias.items())),
            repetition_penalty=self.repetition_penalty,
            repetition_context=self.repetition_context,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            grammar=self._grammar(),
            logprobs=self.logprobs,
            seed=secrets.randbelow(1 << 32) if self.seed is None else self.seed,
            verification=self.verification,
        )
