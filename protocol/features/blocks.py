"""Features between machines: a message says whose they are, and a raw frame behind it holds the bytes.

Pure. What comes from the wire is checked before it is used.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from protocol.kv.arena_header import ElementType
from protocol.messages.base import MAX_CONTEXT, Round, WireRequest
from protocol.messages.features import FeatureBlock, FeatureForm, FeatureShipment
from protocol.messages.remote import MAX_PAYLOAD

Rows: TypeAlias = NDArray[Any]
"""(tokens, outputs * width) of an element type; bfloat16 as its bits, uint16."""


def chosen(rows: Rows, form: FeatureForm, outputs: Sequence[int]) -> Rows | None:
    """The columns of `outputs`, in that order, of rows that hold those of `form`; None if one is not there."""
    if tuple(outputs) == form.outputs:
        return rows
    if not set(outputs) <= set(form.outputs):
        return None
    places = [form.outputs.index(output) for output in outputs]
    divided = rows.reshape(len(rows), len(form.outputs), form.width)
    return divided[:, places].reshape(len(rows), len(places) * form.width)


def as_float32(rows: Rows, element: ElementType) -> NDArray[np.float32] | None:
    """The same numbers; None if one of them is infinite or none."""
    if element is ElementType.BFLOAT16:
        numbers = (rows.astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = rows.astype(np.float32)
    return numbers if np.isfinite(numbers).all() else None


_LARGEST = 65504
"""Half precision ends here. Drafters cut larger numbers anyway."""


def halved(rows: Rows, element: ElementType) -> tuple[ElementType, Rows]:
    """The same rows in an element type of 16 bits."""
    if element is not ElementType.FLOAT32:
        return element, rows
    finite = np.isfinite(rows)
    return ElementType.FLOAT16, np.where(finite, np.clip(rows, -_LARGEST, _LARGEST), rows).astype(np.float16)


_CHECKSUM_BITS = (1 << 63) - 1


def shipments(
    sequence: WireRequest, round: Round, first: int, form: FeatureForm, element: ElementType, rows: Rows
) -> Iterator[FeatureShipment]:
    """The blocks of these rows, none larger than MAX_PAYLOAD. No block holds a row that is larger by itself: then
    there are none, and the draft goes on without features."""
    most = MAX_PAYLOAD // (form.elements * element.size)
    for start in range(0, len(rows) if most else 0, most or 1):
        part = rows[start : start + most]
        payload = np.ascontiguousarray(part).tobytes()
        checksum = _checksum(payload, first + start)
        block = FeatureBlock(sequence, round, first + start, len(part), form, int(element), checksum)
        yield FeatureShipment(block, payload)


def received(block: FeatureBlock, payload: bytes) -> NDArray[np.float32] | None:
    """(rows, outputs * width) of a block from another machine; None if it is damaged or holds numbers that are not
    finite."""
    rows = whole(block, payload)
    return None if rows is None else as_float32(rows, ElementType(block.element))


def whole(block: FeatureBlock, payload: bytes) -> Rows | None:
    """The same in the block's element type, whatever numbers they are; None if the block is damaged."""
    if block.element not in tuple(ElementType) or block.first + block.rows > MAX_CONTEXT:
        return None
    element, width = ElementType(block.element), block.form.elements
    if not len(payload) == block.rows * width * element.size <= MAX_PAYLOAD:
        return None
    if _checksum(payload, block.first) != block.checksum:
        return None
    return np.frombuffer(payload, element.numpy_name).reshape(block.rows, width)


def _checksum(payload: bytes, first: int) -> int:
    # msgpack's integers have 64 bits, msgspec's bounds one less.
    return xxhash.xxh3_64_intdigest(payload, first) & _CHECKSUM_BITS
