"""What a client may ask of a generation, checked before it is sent."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from orchestrator.ranges import out_of_range
from protocol.errors import InputError
from protocol.messages import Sampling, Submit, Verification


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
            return msgspec.convert(body, Submit)
        except msgspec.ValidationError as error:
            raise InputError(f"{out_of_range(error)} See `launch-pipeline generate --help`.") from error

    def _sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            logit_bias=tuple(sorted(self.logit_bias.items())),
            repetition_penalty=self.repetition_penalty,
            repetition_context=self.repetition_context,
            seed=secrets.randbelow(1 << 32) if self.seed is None else self.seed,
            verification=self.verification,
        )
