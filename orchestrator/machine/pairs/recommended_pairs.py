"""Recommended pairs of a target and a draft, as pairs.toml lists them. Knows what they are, not how fast."""

import tomllib
from functools import cache
from importlib import resources
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.contracts.drafters.description import DrafterKind

PROCESSOR_BITS = 32
"""On a processor weights are unpacked to float32."""


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    parameters: Annotated[float, Meta(gt=0.0)]
    """Billions."""
    active: Annotated[float, Meta(gt=0.0)] | None = None
    """Billions that a forward over one token reads, of a mixture of experts or with large tables of embeddings."""
    bits: Annotated[float, Meta(gt=0.0, le=32.0)]
    """Per weight, scales included."""
    kv: tuple[int, ...] = ()
    """As of `KvSizes`: elements of a token in layers that see every token, in layers with a window, and its tokens.
    Empty: not known without its config.json."""
    tokenizer: str
    """Family; models of one divide text alike."""
    kind: DrafterKind | None = None
    """Of a trained drafter, which was made for its pair's target."""
    licence: str = ""
    """Of a trained drafter, as its source states it, or "unknown"."""
    source: str = ""
    """Where the facts about a trained drafter come from."""

    def weights(self, on_processor: bool) -> float:
        """Bytes of all weights, estimated."""
        return self._bytes(self.parameters, on_processor)

    def read(self, on_processor: bool) -> float:
        """Bytes that a forward over one token reads, estimated."""
        return self._bytes(self.active or self.parameters, on_processor)

    def _bytes(self, billions: float, on_processor: bool) -> float:
        return billions * 1e9 * (PROCESSOR_BITS if on_processor else self.bits) / 8


class Pair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    target: Model
    draft: Model


@cache
def pairs() -> dict[str, Pair]:
    """The shipped ones, by name."""
    content = (resources.files("orchestrator.machine.pairs") / "pairs.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(content), dict[str, Pair])


def draft_beside(target: str) -> str | None:
    """The Hugging Face id of the draft that a pair has beside the target with this id."""
    return next((pair.draft.id for pair in pairs().values() if pair.target.id == target), None)
