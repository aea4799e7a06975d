"""The sampling fields of request bodies, derived from `SamplingFields`. Pure."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from orchestrator.api.sampling.sampling_fields import number_fields

NOT_IN_BODIES = {
    "repetition_context": "no API that clients speak has such a field",
    "logprobs": "each API asks for log-probabilities in its own way",
    "verification": "the user who starts the server chooses the acceptance rule",
}
"""Fields of `SamplingFields` that no request body has, and why."""
ONLY_OF_COMPLETIONS = {
    "frequency_penalty": "neither the Responses API nor Anthropic's has it",
    "presence_penalty": "neither the Responses API nor Anthropic's has it",
}
"""Fields that only chat completions and completions have, and why."""
_OWN_RANGES = {"top_k": Annotated[int, Meta(ge=-1)]}
"""Some clients send a top_k of -1 for "all"."""

_FIELDS = number_fields(NOT_IN_BODIES)
BODY_NAMES = tuple(field.name for field in _FIELDS)
SHARED_NAMES = tuple(name for name in BODY_NAMES if name not in ONLY_OF_COMPLETIONS)
"""Fields that every API has. All but completions pass them on to the chat request unchecked."""

if TYPE_CHECKING:

    class CheckedSamplingFields(msgspec.Struct, kw_only=True):
        """BODY_NAMES with their ranges; None is "not given"."""

    class UncheckedSamplingFields(msgspec.Struct, kw_only=True):
        """SHARED_NAMES of any type; None is "not given"."""

        temperature: Any = None
        top_p: Any = None

else:
    CheckedSamplingFields = msgspec.defstruct(
        "CheckedSamplingFields",
        [(field.name, _OWN_RANGES.get(field.name, field.annotation) | None, None) for field in _FIELDS],
        kw_only=True,
    )
    UncheckedSamplingFields = msgspec.defstruct(
        "UncheckedSamplingFields", [(name, Any, None) for name in SHARED_NAMES], kw_only=True
    )
