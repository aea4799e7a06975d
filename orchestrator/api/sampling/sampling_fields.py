"""The numbers among the sampling fields, from which the command line and HTTP bodies derive their own fields."""

from collections.abc import Container
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Meta

from protocol.messages.sampling import SamplingFields


class NumberField(NamedTuple):
    """One field of `SamplingFields` that holds a number."""

    name: str
    annotation: Any
    """The type with its range, as msgspec checks it."""
    kind: type[float] | type[int]
    limits: Meta
    default: float

    @property
    def option(self) -> str:
        """The name of its option on the command line."""
        return f"--{self.name.replace('_', '-')}"


def number_fields(excluded: Container[str]) -> list[NumberField]:
    """All fields of `SamplingFields` in its order, but the excluded ones. Each surface (command line, HTTP, presets)
    excludes by name and gives a reason, so that a new field reaches all of them."""
    hints = get_type_hints(SamplingFields, include_extras=True)
    fields = [field for field in msgspec.structs.fields(SamplingFields) if field.name not in excluded]
    found = []
    for field in fields:
        kind, limits = get_args(hints[field.name])
        found.append(NumberField(field.name, hints[field.name], kind, limits, field.default))
    return found
