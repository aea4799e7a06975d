"""KV between machines: a message says where a block belongs, and a raw frame behind it holds the bytes."""

from collections.abc import Iterator

import numpy as np

from protocol.kv.arena import LayerRows
from protocol.kv.arena_header import ArenaLayout
from protocol.messages.base import WireSequence
from protocol.messages.kv import KvForm
from protocol.messages.remote import MAX_PAYLOAD, KvBlock, Shipment


def kv_form(layout: ArenaLayout) -> KvForm:
    return KvForm(layout.layers, layout.kv_heads, layout.head_size, int(layout.dtype))


def row_bytes(form: KvForm, element_bytes: int) -> int:
    """Bytes of one token in one layer's keys, or equally its values."""
    return form.kv_heads * form.head_size * element_bytes


def shipments(
    sequence: WireSequence, attempt: int, begin: int, keys: LayerRows, values: LayerRows
) -> Iterator[Shipment]:
    """The blocks of one or more rows; `keys` and `values` hold (kv heads, rows, head size) for each layer."""
    layers = [*keys, *values]
    heads, count, size = layers[0].shape
    most = max(1, MAX_PAYLOAD // (heads * size * layers[0].dtype.itemsize))
    for start in range(0, count, most):
        stop = min(count, start + most)
        for layer, rows in enumerate(layers):
            payload = np.ascontiguousarray(rows[:, start:stop]).tobytes()
            yield Shipment(KvBlock(sequence, attempt, begin + start, stop - start, layer), payload)
