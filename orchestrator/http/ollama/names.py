"""Ollama's names of models and its ways to say how long. Pure."""

import re
from typing import Any

from orchestrator.core.models.events import Seconds
from orchestrator.http.errors import ApiError

_LATEST = ":latest"
"""Clients add it to a name without a tag."""
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_MOST_CHARACTERS = 64


def own_name(name: str | None) -> str | None:
    """A name as this server's models have it."""
    return None if not name else name.removesuffix(_LATEST)


def keep_seconds(keep_alive: Any) -> Seconds | None:
    """How long a model stays loaded without requests: a number of seconds, or a text like 1h30m. Negative is for ever,
    which is None. Raises ApiError 400."""
    if isinstance(keep_alive, int | float) and not isinstance(keep_alive, bool):
        seconds = float(keep_alive)
    elif isinstance(keep_alive, str) and len(keep_alive) <= _MOST_CHARACTERS:
        seconds = _seconds(keep_alive.strip())
    else:
        raise _wrong(keep_alive)
    return None if seconds < 0 else seconds


def _seconds(text: str) -> Seconds:
    sign = -1.0 if text.startswith("-") else 1.0
    size = text.lstrip("+-")
    if re.fullmatch(r"\d+(\.\d+)?", size):
        return sign * float(size)
    parts = _PART.findall(size)
    if not parts or "".join(number + unit for number, unit in parts) != size:
        raise _wrong(text)
    return sign * sum(float(number) * _UNITS[unit] for number, unit in parts)


def _wrong(value: Any) -> ApiError:
    return ApiError(
        400, f"keep_alive is {value!r}: give seconds, a duration like 5m, or -1 for ever.", param="keep_alive"
    )
