"""The result of one check of this machine or of a model on it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    status: Literal["ok", "warn", "fail"]
    """warn: works, but slower or with less; fail: a pipeline can't run, or can't run it so."""
    text: str
    next_step: str | None = None
