"""One sequence's KV in MLX: prefill, evaluate trees, commit accepted rows.

Knows no sampling, and no kind of layer cache.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from protocol.inference.layer_cache import ForwardShape
from protocol.inference.layer_caches import layer_cache
from protocol.inference.quantized_kv import Encodings, encode
from protocol.inference.slots import SlotTable
from protocol.kv.arena import LayerRows
from protocol.kv.arena_header import ArenaLayout, ElementType

_DEAD_SLOTS = 64
"""So many dead slots are cheaper to remove than to attend past."""
_ELEMENT_TYPES = {
    mx.float16: ElementType.FLOAT16,
    mx.bfloat16: ElementType.BFLOAT16,
    mx.float32: ElementType.FLOAT32,
}


class TreeSequence:
    """Committed tokens and, behind them, a tree of evaluated rows that may or may not be committed."""

    copyable = True
    """Another sequence can begin with a copy of the KV."""

    def __init__(self, network: Any, encodings: Encodings = ()) -> None:
        """Raises LookupError, with the reason, if a layer of the network needs a cache that is not implemented."""
        self._network = network
        self._encodings = encodings
        self.caches = [layer_cache(stock) for stock in make_prompt_cache(network)]
        """One for each layer."""
        self._windows = {cache.window for cache in self.caches if cache.window is not None}
        self._table = SlotTable()
        encode(self.caches, encodings)

    @property
    def committed(self) -> int:
        """Tokens with committed KV."""
        return self._table.committed

    @property
    def memory(self) -> int:
        """Bytes of all layer caches, room to grow included."""
        return sum(cache.memory for cache in self.caches)

    @property
    def next_row(self) -> int:
        """Number of the next row to be evaluated; numbers are never reused."""
        return self._table.next_row

    def position(self, row: int) -> int:
        """Absolute position of a live row."""
        return self._table.row(row).position

    def prefill(self, tokens: Sequence[int]) -> None:
        """Append committed tokens in one causal forward. There must be no rows."""
        if not tokens:
            return
        if self._table.dead:
            self._compact()
        begin = self._table.size
        self._table.append(len(tokens))
        self._prepare(self._chain(begin, len(tokens)))
        self._logits(tokens)
        self._compute()

    def evaluate(self, tokens: Sequence[int], parents: Sequence[int]) -> mx.array:
        """(L, V) logits, not yet computed, of tokens that become rows next_row, next_row + 1, ...

        A parent is a row's number, of an earlier call or of this one, or -1 for the committed tokens.
        """
        self.begin(parents)
        return self._logits(tokens)

    def begin(self, parents: Sequence[int]) -> ForwardShape:
        """Add rows for a forward and prepare every layer's cache for it; see `evaluate`."""
        rows = self._table.add(parents)
        if self._table.continues(rows):
            return self._prepare(self._chain(rows[0].slot, len(rows)))
        positions = [row.position for row in rows]
        mask: Any = self._table.mask(rows)
        slots: Any = self._table.positions()
        first_seen = {window: self._table.slot_of(min(positions) - window + 1) for window in self._windows}
        shape = ForwardShape(rows[0].slot, mx.array(positions), mx.array(mask), mx.array(slots), first_seen)
        return self._prepare(shape)

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        """Commit the rows of `path` in order, keep those in `surviving`, drop the others.

        The ancestors of surviving rows must be in `path` or survive. Row numbers stay valid.
        """
        self._table.keep(path, surviving)
        if self._table.dead >= _DEAD_SLOTS:
            self._compact()

    def truncate(self, length: int) -> None:
        """Drop committed tokens behind the first `length`, and all rows."""
        self._table.truncate(length)

    def copy(self, length: int) -> "TreeSequence":
        """Another sequence with the KV of the first `length` committed tokens; `length` is positive."""
        other = TreeSequence(self._network, self._encodings)
        other._table = self._table.copy()
        other.truncate(length)
        other.caches = [cache.copy(other._table.size) for cache in self.caches]
        other._compute()
        return other

    def layout(self, capacity: int) -> ArenaLayout | None:
        """Layout of an arena for `capacity` rows of this sequence, after a forward; None if no arena can hold them."""
        forms = {cache.row_form for cache in self.caches}
        form = forms.pop()
        if forms or form is None or form.element not in _ELEMENT_TYPES:
            return None
        return ArenaLayout(len(self.caches), form.heads, capacity, form.size, _ELEMENT_TYPES[form.element])

    def export(self, begin: int, end: int) -> tuple[LayerRows, LayerRows]:
        """Keys and values of committed tokens [begin, end), in the tokens' order.

        They may be views: they are valid until the next evaluation, which is slower while they exist.
        """
        assert begin < end
        slots = self._table.committed_slots(begin, end)
        first, last = int(slots[0]), int(slots[-1])
        where: Any = slice(first, last + 1) if last - first == end - begin - 1 else mx.array(slots)
        keys, values = zip(*(cache.rows(where) for cache in self.caches), strict=True)
        rows = _to_numpy([*keys, *values])
        return rows[: len(keys)], rows[len(keys) :]

    def adopt(
        self, keys: Sequence[NDArray[Any]], values: Sequence[NDArray[Any]], tokens: int, element: ElementType
    ) -> None:
        """Adopt the KV of `tokens` committed tokens; the sequence must be empty.

        Rows behind them, if the arrays have more, are room to grow into. The arrays are copied.
        """
        assert not self._table.size
        for cache, layer_keys, layer_values in zip(self.caches, keys, values, strict=True):
            cache.adopt(_to_mlx(layer_keys, element), _to_mlx(layer_values, element))
        self._table.append(tokens)

    def _chain(self, begin: int, length: int) -> ForwardShape:
        """Tokens that see every slot before them, at the positions that are their slots."""
        first_seen = {window: max(0, begin - window + 1) for window in self._windows}
        return ForwardShape(begin, None, "causal" if length > 1 else None, first_seen=first_seen)

    def _prepare(self, forward: ForwardShape) -> ForwardShape:
        for cache in self.caches:
            cache.forward = forward
        return forward

    def _logits(self, tokens: Sequence[int]) -> mx.array:
        return self._network(mx.array([tokens]), cache=self.caches)[0]

    def _compute(self) -> None:
        mx.eval([cache.arrays for cache in self.caches])

    def _compact(self) -> None:
        begin, slots = self._table.compact()
        if len(slots):
            moved = mx.array(slots)
            for cache in self.caches:
                cache.move(begin, moved)


def _to_numpy(rows: Sequence[mx.array]) -> LayerRows:
    """(heads, rows, size) of each (1, heads, rows, size), as views of its own memory where that is possible;
    bfloat16 as its bits.

    While a view exists, MLX copies its array before it writes to it: drop the views soon.
    """
    plain = [array.view(mx.uint16) if array.dtype == mx.bfloat16 else array for array in rows]
    mx.eval(plain)
    return [np.asarray(array)[0] for array in plain]


def _to_mlx(rows: NDArray[Any], element: ElementType) -> mx.array:
    """A copy, (1, heads, rows, size). The rows may be part of a bigger array."""
    # MLX takes an array with gaps element by element; numpy closes the gaps faster.
    array = mx.array(np.ascontiguousarray(rows[None]))
    return array.view(mx.bfloat16) if element is ElementType.BFLOAT16 else array
