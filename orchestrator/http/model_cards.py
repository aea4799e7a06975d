"""The one model, under each of its names, in the forms of OpenAI's and Anthropic's APIs. Pure."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from protocol.messages.base import Level

ANTHROPIC_VERSION = "anthropic-version"
"""The header by which clients of Anthropic's API are known on routes that both APIs have."""


def model_card(
    name: str, created: int, level: Level | None, sampling: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """In OpenAI's form. `level`: what the target verifies in one forward; None until that is known. `sampling`: values
    for fields that a request omits; None for a model that generates nothing."""
    card = {"id": name, "object": "model", "created": created, "owned_by": "launch-pipeline", "level": level}
    return card if sampling is None else {**card, "sampling_defaults": sampling}


def anthropic_card(name: str, created: int, context: int | None) -> dict[str, Any]:
    """In Anthropic's form. `created` in seconds since 1970; `context` in tokens, None until that is known."""
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def anthropic_cards(names: Sequence[str], created: int, context: int | None) -> dict[str, Any]:
    """All on one page. `names`: at least one."""
    data = [anthropic_card(name, created, context) for name in names]
    return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}
