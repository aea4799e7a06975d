"""When an option changes nothing: each option declares it beside its type, range and help. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, cast, get_args

import msgspec

Facts: TypeAlias = Mapping[str, Any]
"""Options in force by their names, and what else is known. What is missing is not known, so nothing follows from it."""
SET = object()
"""Any value but None."""


class Ineffective:
    """In the annotation of an option, also in a tuple: it changes nothing where all facts have the `wanted` value, or
    one of a tuple of values, and `holds` is true of them; the `reason` says why."""

    def __init__(self, reason: str, holds: Callable[[Facts], bool] = lambda _: True, **wanted: Any) -> None:
        self._reason, self._holds, self._wanted = reason, holds, wanted

    def reason(self, facts: Facts) -> str:
        """Why the option changes nothing beside these facts; empty if it does."""
        return self._reason if all(_has(facts, *each) for each in self._wanted.items()) and self._holds(facts) else ""


def declared(options: type[msgspec.Struct]) -> dict[str, tuple[Ineffective, ...]]:
    """What each field declares."""
    return {field.name: tuple(_declarations(get_args(field.type))) for field in msgspec.structs.fields(options)}


def without_effect(called: str, declarations: Iterable[Ineffective], facts: Facts) -> str:
    """A sentence with the first reason why the option that its user calls `called` changes nothing; else empty."""
    reason = next(filter(None, (each.reason(facts) for each in declarations)), "")
    return reason and f"{called} has no effect: {reason}."


def _has(facts: Facts, name: str, wanted: Any) -> bool:
    if name not in facts or wanted is SET:
        return facts.get(name) is not None
    return facts[name] in (wanted if isinstance(wanted, tuple) else (wanted,))


def _declarations(annotation: Iterable[Any]) -> Iterator[Ineffective]:
    for each in annotation:
        if isinstance(each, Ineffective):
            yield each
        elif isinstance(each, tuple):
            yield from _declarations(cast("tuple[Any, ...]", each))
