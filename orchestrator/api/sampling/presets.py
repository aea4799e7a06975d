"""Named sets of sampling values. Pure."""

from typing import Any

from orchestrator.api.sampling.sampling_fields import number_fields

NOT_PRESET = {
    "repetition_context": "only matters with a repetition penalty, which no preset sets",
    "frequency_penalty": "no preset penalises what was generated",
    "presence_penalty": "no preset penalises what was generated",
    "logprobs": "reports, and changes no token",
    "verification": "chooses the acceptance rule, and not the distribution",
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
