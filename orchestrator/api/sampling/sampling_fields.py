"""The numbers among the sampling fields, from which the command line and HTTP bodies derive their own fields."""

from collections.abc import Container
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Meta

from protocol.messages.sampling import ModelSampling, Sampling, SamplingFields


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
