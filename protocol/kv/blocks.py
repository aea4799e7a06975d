"""KV between machines: where a block belongs is a message, its bytes are a raw frame behind it."""

from collections.abc import Iterator

import numpy as np

from protocol.kv.arena import LayerRows
from protocol.kv.arena_header import ArenaLayout
from protocol.messages.base import WireSequence
from protocol.messages.worker import MAX_PAYLOAD, KvBlock, KvForm, Shipment


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
