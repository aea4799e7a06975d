"""The interface of a layer's cache. Knows no model and no implementation."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
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
    """What one sequence keeps in one layer, in place of mlx-lm's cache of that layer: a `RowCache` or a `FoldingCache`.

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


class RowCache(LayerCache):
    """Keys and values in rows, one a slot. mlx-lm's layer calls it as its own cache."""

    window: int | None = None
    """Tokens that a token sees, itself included; None: all of its path."""
    forgotten = 0
    """Tokens, the first ones, whose rows it has let go."""

    offset: int | TreePositions = 0
    """For mlx-lm's layer: the first token's position if the positions are consecutive, else those of all tokens."""

    def prepare(self, forward: ForwardShape) -> None:
        self.forward = forward
        # The layer reads it twice, and the device waits for that in every layer.
        self.offset = forward.begin if forward.positions is None else TreePositions(forward.positions)

    # What mlx-lm's layers call.

    @property
    def given(self) -> Any:
        return self

    @abstractmethod
    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> MaskKind:
        """The mask of the `length` tokens of the forward over all slots up to its last. With a `window_size`, a token
        sees the last so many tokens of its path, itself included. Raises ValueError if the cache can't serve that."""

    @abstractmethod
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write (1, heads, L, size) of the forward; keys and values of all slots up to its last, in the form that
        mlx-lm's attention takes from the replaced cache."""

    # What the sequence calls.

    @abstractmethod
    def quantized(self, bits: int, fused: bool) -> Any:
        """After a forward: the argument with which `encode` holds keys and values in so many bits; None if this cache
        can't. `fused`: the layer's attention reads them so."""

    @abstractmethod
    def encode(self, encoding: Any) -> None:
        """Before the first forward: hold keys and values in this form, which `quantized` gave for the layer."""

    @abstractmethod
    def forget(self, slots: int, tokens: int) -> None:
        """With a `window`: no forward reads the first `slots` slots any more, which hold the first `tokens` tokens."""

    def remember(self, tokens: int) -> None:
        """Let `reach` find so many first tokens, also once rows behind the window are let go. The slots of these tokens
        are their positions."""
        return

    def cut(self, tokens: int) -> None:
        """Forget all but the first `tokens` tokens, a number that `reach` has given."""
        return

    def shed(self) -> bool:
        """Let `reach` find one place less that takes memory: the last one goes last. Whether there was one."""
        return False

    @property
    def places(self) -> set[int]:
        """The numbers of first tokens that it remembers."""
        return set()

    def first_row(self, tokens: int) -> int:
        """The first token of which it has the rows up to so many first tokens, all of which it can go back to."""
        return self.forgotten

    @property
    @abstractmethod
    def row_form(self) -> RowForm | None:
        """The form of `rows`, after the first forward; None if keys and values differ in it, or there are none.

        Without it, `rows` and `adopt` are never called.
        """

    @abstractmethod
    def rows(self, slots: slice | mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values (1, heads, rows, size) of these slots, in their order; not yet computed."""

    @abstractmethod
    def adopt(self, keys: mx.array, values: mx.array, first: int = 0) -> None:
        """In an empty cache: use (1, heads, slots, size) as the contents of the slots from `first` on, which is above 0
        only for a `window` that never looks before it. Slots without a token are room to grow."""


class FoldingCache(LayerCache):
    """Folds tokens into a state, which can be cut back only to where `reach` says.

    It has no rows: its sequences are not exported to arenas or adopted from them.
    """

    @abstractmethod
    def finish(self) -> None:
        """Called after each forward is built. Raises LookupError if the layer used the cache in an unknown way."""

    @abstractmethod
    def commit(self, slots: Sequence[int], surviving: Collection[int]) -> None:
        """Commit the tokens in these slots, in order; of the others, those in `surviving` slots stay."""

    @abstractmethod
    def cut(self, tokens: int) -> None:
        """Forget all but the first `tokens` tokens, a number that `reach` has given."""

    @abstractmethod
    def remember(self) -> None:
        """Let `reach` find the committed tokens so far, also after later forwards."""

    @abstractmethod
    def shed(self) -> bool:
        """Let `reach` find one place less: the last one that was remembered goes last. Whether there was one."""

    @property
    @abstractmethod
    def places(self) -> set[int]:
        """The numbers of first tokens, above 0, to which it can be cut."""

    @abstractmethod
    def state(self, tokens: int) -> Any:
        """The state behind so many tokens, one of `places`: a tree of lists and dicts, which no later forward
        changes."""

    @abstractmethod
    def resume(self, tokens: int, state: Any) -> None:
        """In an empty cache: go on from what `state` gave."""


def densest(places: Sequence[int]) -> int:
    """The one of ascending places, neither first nor last, that lies in the narrowest gap of its neighbours."""
    inner = range(1, len(places) - 1)
    return places[min(inner, key=lambda index: places[index + 1] - places[index - 1])]


ELEMENT_TYPES = {
    mx.float16: ElementType.FLOAT16,
    mx.bfloat16: ElementType.BFLOAT16,
    mx.float32: ElementType.FLOAT32,
}
