"""Recommended pairs of a target and a draft, as pairs.toml lists them. Knows what they are, not how fast."""

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
Words = Annotated[str, Meta(min_length=1)]


class Chains(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What others report of a drafter that guesses one chain a round."""

    tokens: Annotated[float, Meta(ge=1.0)]
    """A round, the target's own included."""
    guesses: Annotated[int, Meta(ge=1, le=64)]
    """A chain."""
    on: Words
    """The text and the sampling."""

    @property
    def accept(self) -> float:
        """How often a guess is right whose parent is right, if that is the same at every depth: the root of
        1 + a + ... + a^guesses = tokens."""
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            reached = sum(middle**depth for depth in range(self.guesses + 1))
            low, high = (middle, high) if reached < self.tokens else (low, middle)
        return high


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    parameters: Annotated[float, Meta(gt=0.0)]
    """Billions."""
    active: Annotated[float, Meta(gt=0.0)] | None = None
    """Billions that a forward over one token reads, of a mixture of experts or with large tables of embeddings."""
    head: Annotated[float, Meta(ge=0.0)] = 0.0
    """Billions of the target's head that a trained drafter without one reads too, in the target's bits."""
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
    published: Chains | None = None
    refused: str = ""
    """Why no engine runs it; empty if one should."""

    def weights(self, on_processor: bool) -> float:
        """Bytes of all weights, estimated."""
        return self._bytes(self.parameters, on_processor)

    def read(self, on_processor: bool) -> float:
        """Bytes that a forward over one token reads, estimated, without a target's head."""
        return self._bytes(self.active or self.parameters, on_processor)

    def _bytes(self, billions: float, on_processor: bool) -> float:
        return billions * 1e9 * (PROCESSOR_BITS if on_processor else self.bits) / 8


class Pair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    target: Model
    draft: Model

    def draft_read(self, on_processor: bool) -> float:
        """Bytes that a step of the draft over one token reads, estimated."""
        bits = PROCESSOR_BITS if on_processor else self.target.bits
        return self.draft.read(on_processor) + self.draft.head * 1e9 * bits / 8


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
