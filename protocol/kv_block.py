"""KV between machines: where a block belongs is a message, its bytes are a raw frame behind it."""

from collections.abc import Iterator
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta

from protocol.arena import LayerRows
from protocol.arena_header import ArenaLayout
from protocol.messages import Count, KvForm, Message, Round, WireSequence

MAX_PAYLOAD = 1 << 19
"""Bytes of the raw frame. CURVE adds to them, and the whole has to stay under a worker's largest frame."""


class KvBlock(Message, frozen=True):
    """By a prefill worker of another machine: rows of one layer's keys or values, for an arena there.

    Blocks come in order: all layers of some rows, keys of every layer and then values, before the next rows.
    """

    sequence: WireSequence
    question: Round
    """Of the Prefill that it answers."""
    begin: Count
    """Token that the first row belongs to."""
    rows: Annotated[int, Meta(ge=1, le=MAX_PAYLOAD)]
    layer: Annotated[int, Meta(ge=0, lt=2048)]
    """Keys of all layers first."""


class Shipment(NamedTuple):
    """A block and its bytes, (kv heads, rows, head size) of the arena's element type."""

    block: KvBlock
    payload: bytes


def kv_form(layout: ArenaLayout) -> KvForm:
    return KvForm(layout.layers, layout.kv_heads, layout.head_size, int(layout.dtype))


def row_bytes(form: KvForm, element_bytes: int) -> int:
    """Of one token in one layer's keys, or values."""
    return form.kv_heads * form.head_size * element_bytes


def shipments(
    sequence: WireSequence, question: int, begin: int, keys: LayerRows, values: LayerRows
) -> Iterator[Shipment]:
    """The blocks of one or more rows; `keys` and `values` are (kv heads, rows, head size) a layer."""
    layers = [*keys, *values]
    heads, count, size = layers[0].shape
    most = max(1, MAX_PAYLOAD // (heads * size * layers[0].dtype.itemsize))
    for start in range(0, count, most):
        stop = min(count, start + most)
        for layer, rows in enumerate(layers):
            payload = np.ascontiguousarray(rows[:, start:stop]).tobytes()
            yield Shipment(KvBlock(sequence, question, begin + start, stop - start, layer), payload)
