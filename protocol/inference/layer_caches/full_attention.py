"""Full attention, and sliding windows over it: keys and values of every slot, as they are or in fewer bits."""

from copy import copy
from typing import Any, NamedTuple, Self, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache

from protocol.inference.layer_cache import (
    ROWS_TOGETHER,
    ForwardShape,
    LayerCache,
    MaskKind,
    RowForm,
    TreePositions,
    densest,
)

Stored: TypeAlias = tuple[mx.array, ...]
"""Arrays (1, heads, rows, any size)."""
_GROUP_SIZES = (64, 32)
"""Of MLX's quantization, the best first: a group has a scale and a bias."""


class PlainRows:
    """Rows as the model computes them. A row's bytes depend on nothing but that row, so it is stored alike in a forward
    of any width."""

    def encoded(self, rows: mx.array) -> Stored:
        """Store (1, heads, rows, size)."""
        return (rows,)

    def fetched(self, stored: Stored, slots: slice) -> mx.array:
        """What mlx-lm's attention takes of these slots."""
        return stored[0][:, :, slots]

    def packed(self, stored: Stored) -> mx.array:
        """All bytes of a row in one, (1, heads, rows, elements) of the model's own element type."""
        return stored[0]

    def unpacked(self, packed: mx.array) -> Stored:
        """The inverse of `packed`."""
        return (packed,)


class QuantizedRows(NamedTuple):
    """The same in MLX's affine quantization: packed uint32, and a scale and a bias for each group of elements."""

    bits: int
    group_size: int
    fused: bool
    """Attention reads the quantized rows, by mlx-lm's quantized attention. Otherwise it gets rows of the model's own
    element type, made for each forward."""

    def encoded(self, rows: mx.array) -> Stored:
        return mx.quantize(rows, group_size=self.group_size, bits=self.bits)

    def fetched(self, stored: Stored, slots: slice) -> Any:
        packed, scales, biases = seen = _taken(stored, slots)
        if self.fused:
            return seen
        return mx.dequantize(packed, scales, biases, group_size=self.group_size, bits=self.bits)

    def packed(self, stored: Stored) -> mx.array:
        element = stored[1].dtype
        bits = _bits_type(element)
        return mx.concatenate([mx.contiguous(part).view(bits) for part in stored], axis=-1).view(element)

    def unpacked(self, packed: mx.array) -> Stored:
        element = packed.dtype
        bits = _bits_type(element)
        elements = self.bits * self.group_size // (8 * element.size)
        groups = packed.shape[-1] // (elements + 2)
        parts = mx.split(packed.view(bits), [groups * elements, groups * (elements + 1)], axis=-1)
        rows, scales, biases = map(mx.contiguous, parts)
        return rows.view(mx.uint32), scales.view(element), biases.view(element)


def quantized_rows(bits: int, sizes: tuple[int, ...], fused: bool) -> QuantizedRows | None:
    """The encoding of keys and values with heads of these sizes; None if no group size divides them."""
    group = next((each for each in _GROUP_SIZES if not any(size % each for size in sizes)), None)
    return None if group is None else QuantizedRows(bits, group, fused)


def _bits_type(element: mx.Dtype) -> mx.Dtype:
    return mx.uint16 if element.size == 2 else mx.uint32


_MOST_PLACES = 3
"""Remembered beside the last rows: each may take as much memory as the window."""
_GROWTH = 256
"""Slots by which the arrays grow, as in mlx-lm's own cache."""


class FullAttentionCache(LayerCache):
    """Arrays (1, heads, slots, size). A slot's rows hold the keys, or values, of its token. mlx-lm's layer calls it as
    its own cache.

    A layer that computes no attention has a cache that stays empty.
    """

    window: int | None = None
    """Tokens that a token sees, itself included; None: all of its path."""
    forgotten = 0
    """Tokens, the first ones, whose rows it has let go."""
    offset: int | TreePositions = 0
    """For mlx-lm's layer: the first token's position if the positions are consecutive, else those of all tokens."""

    def __init__(self, stock: KVCache | RotatingKVCache) -> None:
        super().__init__(stock)
        self._keys: Stored = ()
        self._values: Stored = ()
        self._encoding: PlainRows | QuantizedRows = PlainRows()
        self._end = 0
        """Slot behind the last forward."""
        self._base = 0
        """The first slot that has rows."""

    def prepare(self, forward: ForwardShape) -> None:
        self.forward = forward
        # The layer reads it twice, and the device waits for that in every layer.
        self.offset = forward.begin if forward.positions is None else TreePositions(forward.positions)

    @property
    def given(self) -> Any:
        return self

    # Some layers replace the arrays by equal ones that depend on others. In fewer bits theirs are left as they are.

    @property
    def keys(self) -> mx.array:
        return self._keys[0]

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self._keys = (keys,) if len(self._keys) == 1 else self._keys

    @property
    def values(self) -> mx.array:
        return self._values[0]

    @values.setter
    def values(self, values: mx.array) -> None:
        self._values = (values,) if len(self._values) == 1 else self._values

    def quantized(self, bits: int, fused: bool) -> QuantizedRows | None:
        """After a forward: the argument with which `encode` holds keys and values in so many bits; None if this cache
        can't. `fused`: the layer's attention reads them so."""
        if not self._keys:
            return None
        sizes = self._keys[0].shape[-1], self._values[0].shape[-1]
        return quantized_rows(bits, sizes, fused)

    def encode(self, encoding: QuantizedRows) -> None:
        """Before the first forward: hold keys and values in this form, which `quantized` gave for the layer."""
        self._encoding = encoding
        if encoding.fused:
            # mlx-lm's attention looks for these two attributes.
            self.bits, self.group_size = encoding.bits, encoding.group_size

    @property
    def _first(self) -> int:
        """The first slot that the forward reads."""
        return 0

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> MaskKind:
        """The mask of the `length` tokens of the forward over all slots up to its last. With a `window_size`, a token
        sees the last so many tokens of its path, itself included."""
        if window_size is not None and self.forward.begin + length > window_size:
            return self.forward.window_mask(length, window_size)
        if return_array and isinstance(self.forward.mask, str):
            return create_causal_mask(length, self.forward.begin)
        return self.forward.mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write (1, heads, L, size) of the forward; keys and values of all slots up to its last, in the form that
        mlx-lm's attention takes from the replaced cache."""
        begin = self.forward.begin
        self._end = begin + keys.shape[2]
        rows = slice(begin - self._base, self._end - self._base)
        self._keys = _written(self._keys, self._encoding.encoded(keys), rows)
        self._values = _written(self._values, self._encoding.encoded(values), rows)
        return self.keys_and_values()

    @property
    def plain(self) -> bool:
        """Whether rows are stored as they are, in 32 bits."""
        return isinstance(self._encoding, PlainRows) and (not self._keys or self._keys[0].dtype == mx.float32)

    def room(self, form: RowForm) -> tuple[mx.array, mx.array]:
        """Keys and values, in each of which the caller writes the rows of the forward in place: `plain` ones."""
        self._end = self.forward.begin + self.forward.length
        if not self._keys or self._keys[0].shape[2] < self._end:
            row = (mx.zeros((1, form.heads, 1, form.size), form.element),)
            self._keys, self._values = _grown(self._keys, row, self._end), _grown(self._values, row, self._end)
        return self._keys[0], self._values[0]

    def keys_and_values(self) -> tuple[Any, Any]:
        """As the forward in progress has seen them: layers that share another one's KV ask for them."""
        seen = slice(self._first - self._base, self._end - self._base)
        return self._encoding.fetched(self._keys, seen), self._encoding.fetched(self._values, seen)

    def forget(self, slots: int, tokens: int) -> None:
        """With a `window`: no forward reads the first `slots` slots any more, which hold the first `tokens` tokens."""

    def remember(self, tokens: int) -> None:
        """Let `reach` find so many first tokens, also once rows behind the window are let go. The slots of these tokens
        are their positions."""

    def cut(self, tokens: int) -> None:
        """Forget all but the first `tokens` tokens, a number that `reach` has given."""

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

    def reach(self, tokens: int) -> int:
        return tokens

    @property
    def arrays(self) -> list[mx.array]:
        return [*self._keys, *self._values]

    def move(self, begin: int, slots: mx.array) -> None:
        end = begin + slots.size
        for array in (*self._keys, *self._values):
            array[:, :, begin:end] = mx.take(array, slots, axis=2)

    def shrink(self, slots: int) -> None:
        # A contiguous part of an array would keep all of it in memory.
        held = mx.arange(max(0, slots - self._base))
        self._keys, self._values = (
            tuple(mx.contiguous(mx.take(array, held, axis=2)) for array in stored)
            for stored in (self._keys, self._values)
        )
        self._end = min(self._end, slots)

    def copy(self, slots: int) -> Self:
        other = copy(self)
        # Arrays are written in place, so each cache needs its own; with room, or the next forward copies them again.
        held = max(0, slots - self._base)
        other._keys, other._values = (
            _grown(taken, taken, held + _GROWTH // 2)
            for taken in (_taken(stored, slice(held)) for stored in (self._keys, self._values))
        )
        return other

    @property
    def row_form(self) -> RowForm | None:
        """The form of `rows`, after the first forward; None if keys and values differ in it, or there are none.

        Without it, `rows` and `adopt` are never called.
        """
        if not self._keys:
            return None
        arrays = self._packed(slice(1))
        forms = {RowForm(array.shape[1], array.shape[3], array.dtype) for array in arrays}
        return forms.pop() if len(forms) == 1 else None

    def rows(self, slots: slice | mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values (1, heads, rows, size) of these slots, in their order; not yet computed."""
        if isinstance(slots, slice):
            return self._packed(slice(slots.start - self._base, slots.stop - self._base))
        return self._packed(slots - self._base)

    def _packed(self, held: slice | mx.array) -> tuple[mx.array, mx.array]:
        """Of these rows that it holds."""
        return self._encoding.packed(_taken(self._keys, held)), self._encoding.packed(_taken(self._values, held))

    def adopt(self, keys: mx.array, values: mx.array, first: int = 0) -> None:
        """In an empty cache: use (1, heads, slots, size) as the contents of the slots from `first` on, which is above 0
        only for a `window` that never looks before it. Slots without a token are room to grow."""
        self._keys, self._values = self._encoding.unpacked(keys), self._encoding.unpacked(values)
        self._base = self.forgotten = first


class _Behind(NamedTuple):
    """The last rows of a window, from the slot `first` on."""

    first: int
    keys: Stored
    values: Stored


class WindowCache(FullAttentionCache):
    """A sliding window. Attention reads the window alone. Rows behind it stay until the sequence lets them go, so that
    a rejected tree leaves nothing to repair, and a sequence can be cut back and shared at most tokens."""

    def __init__(self, stock: Any) -> None:
        """Raises LookupError for a cache that keeps its first tokens in sight."""
        super().__init__(stock)
        if stock.keep:
            raise LookupError("its windows keep the first tokens")
        self.window = stock.max_size
        self._places: dict[int, _Behind | None] = {}
        """What a forward behind so many tokens reads; None while these rows are among the others."""

    def prepare(self, forward: ForwardShape) -> None:
        super().prepare(forward)
        if forward.begin < self._base:
            self._keys, self._values, self._base, self.forgotten = (), (), 0, 0

    def remember(self, tokens: int) -> None:
        self._places = dict(sorted({tokens: None, **self._places}.items()))
        if len(self._places) > _MOST_PLACES:
            del self._places[densest([0, *self._places])]

    def cut(self, tokens: int) -> None:
        kept = self._places.get(tokens)
        if kept is not None and not self._reads(tokens):
            # Equal arrays of its own, since they are written in place.
            self._keys, self._values = (tuple(map(mx.contiguous, stored)) for stored in (kept.keys, kept.values))
            self._base = self.forgotten = kept.first
            self._end, self._places[tokens] = tokens, None
        self._places = {place: kept for place, kept in self._places.items() if place <= tokens}

    def shed(self) -> bool:
        places = [place for place, kept in self._places.items() if kept is not None]
        if places:
            del self._places[densest([0, *places]) if len(places) > 1 else places[0]]
        return bool(places)

    @property
    def places(self) -> set[int]:
        return set(self._places)

    @property
    def arrays(self) -> list[mx.array]:
        kept = [array for kept in self._places.values() if kept for array in (*kept.keys, *kept.values)]
        return [*super().arrays, *kept]

    def copy(self, slots: int) -> Self:
        other = super().copy(slots)
        other._places = dict(self._places)
        return other

    def first_row(self, tokens: int) -> int:
        kept = self._places.get(tokens)
        return self.forgotten if kept is None else kept.first

    def rows(self, slots: slice | mx.array) -> tuple[mx.array, mx.array]:
        for place, kept in self._places.items():
            if kept and isinstance(slots, slice) and kept.first <= slots.start < self._base and slots.stop <= place:
                held = slice(slots.start - kept.first, slots.stop - kept.first)
                return self._encoding.packed(_taken(kept.keys, held)), self._encoding.packed(_taken(kept.values, held))
        return super().rows(slots)

    def _reads(self, tokens: int) -> bool:
        """Whether the rows that a forward behind so many tokens reads are among its own."""
        assert self.window is not None
        return self.forgotten <= max(0, tokens - self.window + 1)

    def _first_behind(self, tokens: int) -> int:
        """The first row that is remembered for a forward behind so many tokens."""
        assert self.window is not None
        return max(0, tokens - self.window + 1) // ROWS_TOGETHER * ROWS_TOGETHER

    def _behind(self, tokens: int) -> "_Behind":
        first = max(self._base, self._first_behind(tokens))
        held = slice(first - self._base, tokens - self._base)
        keys, values = (tuple(map(mx.contiguous, _taken(stored, held))) for stored in (self._keys, self._values))
        return _Behind(first, keys, values)

    def forget(self, slots: int, tokens: int) -> None:
        for place, kept in self._places.items():
            if kept is None and self._first_behind(place) < tokens:
                self._places[place] = self._behind(place)
        held = slice(slots - self._base, self._end - self._base)
        self._keys = tuple(map(mx.contiguous, _taken(self._keys, held)))
        self._values = tuple(map(mx.contiguous, _taken(self._values, held)))
        self._base, self.forgotten = slots, tokens

    def reach(self, tokens: int) -> int:
        if self._reads(tokens):
            return tokens
        return max((place for place, kept in self._places.items() if kept and place <= tokens), default=0)

    def move(self, begin: int, slots: mx.array) -> None:
        every = np.array(slots, np.int64)
        held = mx.array(every[every >= self._base] - self._base)
        if begin < self._base:
            self._base = begin + len(every) - held.size
        super().move(max(begin - self._base, 0), held)

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> MaskKind:
        assert self.window is not None
        # mlx-lm's own cache holds no more than its window, whatever the model asks for.
        window = min(window_size or self.window, self.window)
        if length == 1 and self.forward.mask is None and window == self.window and not return_array:
            return None
        mask = super().make_mask(length, return_array, window)
        return mask[:, self._first :] if isinstance(mask, mx.array) else mask

    @property
    def _first(self) -> int:
        """The first slot that the forward reads."""
        assert self.window is not None
        return self.forward.first_seen.get(self.window, 0)


class ChunkCache(FullAttentionCache):
    """Attention to the tokens of one chunk of positions. The model makes the mask; the rows of earlier chunks stay."""

    start_position = 0

    def maybe_trim_front(self) -> None:
        """mlx-lm's own forgets the rows of earlier chunks here."""


# The device waits for what these do in every layer: hence lists in place of generators, few calls, and no ellipsis
# (four such indexings a layer took 2 µs longer).


def _taken(stored: Stored, slots: slice | mx.array) -> Stored:
    return tuple([array[:, :, slots] for array in stored])


def _written(old: Stored, new: Stored, slots: slice) -> Stored:
    """`old` with `new` at the slots of axis 2, grown by whole steps where it is too short."""
    written = old if old and slots.stop <= old[0].shape[2] else _grown(old, new, slots.stop)
    for array, rows in zip(written, new, strict=True):
        array[:, :, slots] = rows
    return written


def _grown(old: Stored, new: Stored, end: int) -> Stored:
    """Arrays of the form of `new` that begin with `old`, for `end` slots and up to a whole step more."""
    grown: list[mx.array] = []
    for place, rows in enumerate(new):
        batch, heads, _, size = rows.shape
        capacity = old[place].shape[2] if old else 0
        more = mx.zeros((batch, heads, -(-end // _GROWTH) * _GROWTH - capacity, size), rows.dtype)
        grown.append(mx.concatenate([old[place], more], axis=2) if old else more)
    return tuple(grown)
