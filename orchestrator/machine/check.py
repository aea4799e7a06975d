"""One thing that was checked: this machine, a model on it, or what a measurement found."""

from typing import Literal

import msgspec


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of one check."""

    name: str
    status: Literal["ok", "warn", "fail"]
    """warn: works, but slower or with less; fail: it is wrong, or a pipeline can't run so."""
    text: str
    next_step: str | None = None
