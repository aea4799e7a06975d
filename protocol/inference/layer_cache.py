"""The interface of a layer's cache. Knows no model and no implementation."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import mlx.core as mx

from protocol.kv.arena_header import ElementType

MaskKind: TypeAlias = mx.array | Literal["causal"] | None


ROWS_TOGETHER = 256
"""Rows of a window are remembered in multiples of so many tokens, so that files of so many can be made of them."""


class ForwardShape(NamedTuple):
    """Slots, positions and mask of one forward."""

    begin: int
    """Slot of its first token."""
    length: int
    """Its tokens."""
    positions: mx.array | None = None
    """(L,) absolute positions, or None when they are begin, begin + 1, ..."""
    mask: MaskKind = None
    parents: tuple[int, ...] | None = None
    """Slot of the token before each one; -1: the last committed token. None: the tokens are committed already."""
    slots: mx.array | None = None
    """(S,) absolute positions of the tokens in all slots up to the forward's last, or None when they are 0, 1, ...

    Those of dead slots mean nothing: no mask shows them."""
    first_seen: Mapping[int, int] = MappingProxyType({})
    """By window: the first slot that a token of the forward sees."""
    read: bool = True
    """Whether its logits are sure to be. Else they are computed once somebody does."""

    def window_mask(self, length: int, window: int) -> mx.array:
        """(L, S): `mask` without the slots that are `window` or more positions before a token of the forward."""
        last = self.begin + length
        keys = mx.arange(last) if self.slots is None else self.slots
        tokens = mx.arange(self.begin, last) if self.positions is None else self.positions
        near = keys[None] > tokens[:, None] - window
        seen = self.mask if isinstance(self.mask, mx.array) else keys[None] <= tokens[:, None]
        return seen & near


class TreePositions:
    """(L,) absolute positions of a forward's tokens, in place of the offset from which consecutive ones count.

    A language model's ropes understand it. Other arithmetic works if it adds the offset to 0, 1, ..., L - 1, and fails
    or shows in the proof of a model's level otherwise.
    """

    def __init__(self, positions: mx.array) -> None:
        self.positions = positions

    def __mlx_array__(self) -> mx.array:
        """(L,): what has to be added to 0, 1, ..., L - 1."""
        return self.positions - mx.arange(self.positions.size)

    @classmethod
    def of(cls, offset: object, length: int) -> "TreePositions | None":
        """From an offset that a rope of `length` tokens is called with."""
        if isinstance(offset, cls):
            return offset
        if isinstance(offset, mx.array) and offset.ndim == 1 and offset.size == length > 1:
            return cls(offset + mx.arange(length))
        return None


class RowForm(NamedTuple):
    """One token's keys in one layer, and equally its values: (heads, size) elements."""

    heads: int
    size: int
    element: mx.Dtype


class LayerCache(ABC):
    """What one sequence keeps in one layer, in place of mlx-lm's cache of that layer: rows or a state.

    The sequence gives every token a slot, in the order of evaluation: a forward of L tokens writes the slots
    [forward.begin, forward.begin + L). A slot that no later mask shows is dead. The cache does not know which slots are
    dead: `move` removes them, or a later forward overwrites them. Slot numbers are the same in all layers.

    So an implementation serves a forward from any subset of the slots before it, or says why it does not (`no_trees`):
    then every forward is one path behind all slots before it.

    An implementation is constructed with the mlx-lm cache that it replaces, which has the layer's sizes. Beside the
    members below it has the other attributes of that class that mlx-lm's layers read (`bits`, for example).
    """

    no_trees = ""
    """Why a forward can hold one path only, as half a sentence; empty: it may hold any tree."""

    def __init__(self, stock: Any) -> None:
        self.forward = ForwardShape(0, 1)
        """The next forward, or the one in progress."""

    @property
    @abstractmethod
    def given(self) -> Any:
        """What mlx-lm's layer gets as its cache."""

    def prepare(self, forward: ForwardShape) -> None:
        """Called before each forward. With `no_trees`, no slot before `forward.begin` is dead."""
        self.forward = forward

    @abstractmethod
    def reach(self, tokens: int) -> int:
        """The most of the first `tokens` committed tokens from which a sequence can go on."""

    @property
    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """All arrays of the cache, computed or not; empty before the first forward."""

    @property
    def memory(self) -> int:
        """Bytes, room to grow included."""
        return sum(array.nbytes for array in self.arrays)

    @abstractmethod
    def move(self, begin: int, slots: mx.array) -> None:
        """Move the contents of `slots` (ascending) to the slots from `begin` on. Never called with `no_trees`."""

    def shrink(self, slots: int) -> None:
        """Free the memory of all but the first `slots` slots, where slots have memory."""
        return

    @abstractmethod
    def copy(self, slots: int) -> Self:
        """Another cache with the first `slots` slots of this one, in arrays of its own; not yet computed."""


def densest(places: Sequence[int]) -> int:
    """The one of ascending places, neither first nor last, that lies in the narrowest gap of its neighbours."""
    inner = range(1, len(places) - 1)
    return places[min(inner, key=lambda index: places[index + 1] - places[index - 1])]


ELEMENT_TYPES = {
    mx.float16: ElementType.FLOAT16,
    mx.bfloat16: ElementType.BFLOAT16,
    mx.float32: ElementType.FLOAT32,
}
