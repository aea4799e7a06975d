"""Rows of features as numbers: choice of outputs, conversion to float32, and the refusal of what is not finite."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from protocol.kv.arena_header import ElementType
from protocol.messages.features import FeatureForm

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
