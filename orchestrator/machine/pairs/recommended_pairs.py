"""Recommended pairs of a target and a draft, as pairs.toml lists them."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.contracts.drafters.description import DrafterKind
from protocol.errors import InputError

PROCESSOR_BITS = 32
"""On a processor weights are unpacked to float32."""


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    parameters: Annotated[float, Meta(gt=0.0)]
    """Billions."""
    bits: Annotated[float, Meta(gt=0.0, le=32.0)]
    """Per weight, scales included."""
    kv: tuple[int, ...] = ()
    """As of `KvSizes`: elements of a token in layers that see every token, in layers with a window, its tokens, and
    bytes of a state. Empty: not known without its config.json."""
    tokenizer: str = ""
    """Family; models of one divide text alike. A trained drafter has its target's."""
    kind: DrafterKind | None = None
    """Of a trained drafter, which was made for its pair's target. The fields below are those of one."""
    format: str = ""
    """Whose packaging, as `Drafter.format` names it."""
    size: str = ""
    """As its source states it."""
    licence: str = ""
    """As its source states it."""
    source: str = ""
    """Where the facts come from."""
    refused: str = ""
    """Why no engine runs it; empty if one should."""

    def weights(self, on_processor: bool) -> float:
        """Bytes of all weights, estimated."""
        return self.parameters * 1e9 * (PROCESSOR_BITS if on_processor else self.bits) / 8


class Pair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    target: Model
    draft: Model


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    target: Model | str
    """Or the name of an entry with the same target."""
    draft: Model


@cache
def published() -> Mapping[str, Pair]:
    """All that are listed, by name, with those that no engine runs."""
    content = (resources.files("orchestrator.machine.pairs") / "pairs.toml").read_text(encoding="utf-8")
    entries = msgspec.convert(tomllib.loads(content), dict[str, _Entry])
    return {name: Pair(target=_target(entries, entry), draft=entry.draft) for name, entry in entries.items()}


def _target(entries: Mapping[str, _Entry], entry: _Entry) -> Model:
    while isinstance(entry.target, str):
        entry = entries[entry.target]
    return entry.target


def pairs() -> dict[str, Pair]:
    """Those that an engine should run, by name."""
    return {name: pair for name, pair in published().items() if not pair.draft.refused}


def runnable(name: str) -> Pair:
    """The pair of this name. Raises InputError for one that no engine runs."""
    pair = published()[name]
    if pair.draft.refused:
        raise InputError(
            f"The drafter of {name}, {pair.draft.id}, can't be run yet: {pair.draft.refused}. See `launch-pipeline "
            f"pairs --pair {name}` for others of its target."
        )
    return pair


def beside(target: Model) -> dict[str, Pair]:
    """All drafts that are listed for a target, by the names of their pairs."""
    return {name: pair for name, pair in published().items() if pair.target.id == target.id}


def draft_beside(target: str) -> str | None:
    """The Hugging Face id of the draft that a pair has beside the target with this id."""
    return next((pair.draft.id for pair in pairs().values() if pair.target.id == target), None)
