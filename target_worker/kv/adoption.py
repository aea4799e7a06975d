"""KV that somebody else evaluated becomes a sequence's own, if it is what it should be. Knows no requests."""

from typing import NamedTuple

from protocol.inference.tree_model import TreeModel
from protocol.inference.tree_sequence import TreeSequence
from protocol.kv.arena_header import ArenaError
from protocol.kv.exchange import KvExchange
from protocol.kv.segments import SegmentError
from protocol.messages.worker import KvReference

_ROOM_SHARE = 16
"""One row of room for so many adopted ones, so that the next few tokens need no new array."""


class Adoption(NamedTuple):
    """A sequence that holds `tokens` tokens, or none and the reason."""

    cache: TreeSequence
    tokens: int = 0
    warning: str = ""


def adopt(model: TreeModel, exchange: KvExchange | None, reference: KvReference) -> Adoption:
    """Copy what an arena holds. Whatever is wrong with it is told, and costs a prefill."""
    cache = model.sequence()
    if exchange is None:
        return Adoption(cache, warning="This target shares no KV: prefill again.")
    try:
        arena = exchange.adopt(reference)
    except (ArenaError, SegmentError) as error:
        return Adoption(cache, warning=str(error))
    rows = min(arena.layout.capacity, reference.tokens + reference.tokens // _ROOM_SHARE)
    keys, values = list(arena.keys[:, :, :rows]), list(arena.values[:, :, :rows])
    cache.adopt(keys, values, reference.tokens, arena.layout.dtype)
    del keys, values
    arena.close()
    return Adoption(cache, reference.tokens)
