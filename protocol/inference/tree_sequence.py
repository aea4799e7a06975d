"""One sequence's KV in MLX: prefill, evaluate trees, commit accepted rows.

Knows no sampling, and no kind of layer cache.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from protocol.inference.device import compute
from protocol.inference.layer_cache import ELEMENT_TYPES, ForwardShape, LayerCache
from protocol.inference.layer_caches import alike, flat, replaced
from protocol.inference.layer_caches.full_attention import FullAttentionCache
from protocol.inference.layer_caches.state import FoldingCache
from protocol.inference.processor_attention import processor_operations
from protocol.inference.quantized_kv import Encodings, encode
from protocol.inference.recurrence import reading
from protocol.inference.slots import SlotTable
from protocol.inference.tap import LayerTap, Recorded
from protocol.kv.arena import LayerRows
from protocol.kv.arena_header import ArenaLayout, ElementType
from protocol.messages.base import Level

Tokens: TypeAlias = Sequence[int] | mx.array
"""Of a forward; as an array (L,) they need not be computed."""
_DEAD_SLOTS = 64
"""So many dead slots are cheaper to remove than to attend past."""
_MASK_COSTS = 8192
"""Slots from which a lone token without a mask has a faster kernel on a GPU (MLX, `sdpa_vector_2pass` in
mlx/backend/metal/scaled_dot_product_attention.cpp): dead slots are removed before it."""
_MOST_TOGETHER = 8
"""So many tokens that are evaluated again join the next forward. More of them have a forward of their own."""
_SPARE_ROWS = 1024
"""Rows kept behind a window, so that a conversation can be cut back by so many tokens without a new prefill. Twice as
many are held before the rest is let go."""


class TreeSequence:
    """Committed tokens and, behind them, a tree of evaluated rows that may or may not be committed."""

    copyable = True
    """Another sequence can begin with a copy of the KV."""
    chooses_places = False
    """Some layer folds tokens into a state: where a forward of `prefill` ends, it can be remembered."""

    def __init__(
        self, network: Any, level: Level = "tree", encodings: Encodings = (), tap: LayerTap | None = None
    ) -> None:
        """`tap`: that of the network, if it has one."""
        self._network = network
        self.level: Level = level
        """The trees that one forward evaluates."""
        self._encodings = encodings
        self.tap = tap
        self.recorded: Recorded | None = None
        """What the tokens of the last forward left, until the caller takes it or the rows are dropped."""
        self._layers = [replaced(stock, level) for stock in make_prompt_cache(network)]
        self._use(flat(self._layers))
        self.chooses_places = bool(self._folding)
        self._windows = {cache.window for cache in self._rows if cache.window is not None}
        self._tokens: list[int] = []
        """The token in each slot, below level tree."""
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

    def prefill(self, tokens: Sequence[int], *, remember: bool = True) -> mx.array | None:
        """Append committed tokens in one causal forward. There must be no rows. Returns the (L, V) logits, which are
        computed only if they are used; None without tokens. `remember`: states can go back to the last of them."""
        self.recorded = None
        if not tokens:
            return None
        if self._table.dead:
            self._compact()
        begin = self._table.size
        self._table.append(len(tokens))
        logits = self._logits(tokens, self._chain(begin, len(tokens))._replace(read=False))
        self._compute()
        for cache in self._folding if remember else ():
            cache.remember()
        return logits

    def remember(self, tokens: int) -> None:
        """Let windows go back to the first `tokens` committed tokens, also once later ones are many: not before
        `prefill` has appended them, and before they lie far behind. States too, if these are all tokens so far."""
        for cache in self._rows:
            cache.remember(tokens)
        for cache in self._folding if tokens == self.committed else ():
            cache.remember()

    @property
    def places(self) -> set[int]:
        """The numbers of first tokens, the last one apart, to which layers remember a way back."""
        limiting = [*self._folding, *(cache for cache in self._rows if cache.window is not None)]
        found = [cache.places for cache in limiting]
        return {place for place in set[int]().union(*found) if 0 < self.reach(place) == place <= self.committed}

    def evaluate(self, tokens: Tokens, parents: Sequence[int], first: int | None = None) -> mx.array:
        """(L, V) logits, which may not be computed yet, of tokens that become rows next_row, next_row + 1, ... Only at
        level tree the tokens may be an array.

        A parent is a row's number, of an earlier call or of this one, or -1 for the committed tokens. At level chain
        every row is the child of the one before it, at level plain there is one row.

        With `first`, the tokens in front of those that have a parent are committed: they replace the committed tokens
        from this index on, and rows stay as they are (`SlotTable.replace`). Only at level tree, without recurrences.
        """
        return self._logits(tokens, self._shape(parents, first, len(tokens) - len(parents)))

    def restart(self, position: int) -> None:
        """Drop all committed tokens: the next one stands at `position`. Rows stay (`SlotTable.restart`)."""
        self._table.restart(position)

    def skip(self, count: int) -> None:
        """Give the next `count` row numbers to no row."""
        self._table.next_row += count

    def alike(self, caches: Sequence[Any]) -> list[Any]:
        """One thing for each of `caches`, in the structure that mlx-lm's model expects."""
        return alike(self._layers, caches)

    def begin(self, parents: Sequence[int], first: int | None = None, replaced: int = 0) -> ForwardShape:
        """Add rows for a forward, behind so many committed tokens, and prepare every layer's cache for it; see
        `evaluate`. The level is tree."""
        return self._prepare(self._shape(parents, first, replaced))

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        """Commit the rows of `path` in order, keep those in `surviving`, drop the others.

        The ancestors of surviving rows must be in `path` or survive. Row numbers stay valid.
        """
        surviving = tuple(surviving)
        if self._folding:
            self._commit(path, surviving)
        self._table.keep(path, surviving)
        if self._table.dead >= _DEAD_SLOTS:
            self._compact()

    def reach(self, length: int) -> int:
        """The most of the first `length` committed tokens whose KV would remain after `truncate`."""
        limiting = [*self._folding, *(cache for cache in self._rows if cache.forgotten)]
        while limiting and (less := min(cache.reach(length) for cache in limiting)) < length:
            length = less
        return length

    @property
    def forgotten(self) -> int:
        """Tokens, the first ones, whose rows some layer has let go: they can't be exported."""
        return max((cache.forgotten for cache in self._rows), default=0)

    def forget(self, saved: int) -> None:
        """Let go of rows that lie far behind windows, of no more than the first `saved` tokens."""
        for window in self._windows:
            caches = [cache for cache in self._rows if cache.window == window]
            tokens = min(saved, self.committed - window - _SPARE_ROWS)
            if tokens - caches[0].forgotten >= _SPARE_ROWS:
                slots = self._table.slot_of(tokens)
                for cache in caches:
                    cache.forget(slots, tokens)
                compute([cache.arrays for cache in caches])

    def truncate(self, length: int) -> None:
        """Drop all rows, and committed tokens behind the first `length`, or a few more: see `reach`."""
        if length < self.committed:
            length = self.reach(length)
            self._cut_states(length)
        self._table.truncate(length)
        self.recorded = None

    def shed(self) -> bool:
        """Forget one state to which `truncate` could go back; the latest one goes last. Whether there was one."""
        shed = [cache.shed() for cache in (*self._folding, *self._rows)]
        return any(shed)

    def shorten(self, length: int) -> None:
        """`truncate`, and free the memory of what is dropped."""
        self.truncate(length)
        for cache in self.caches:
            cache.shrink(self._table.size)
            # A layer at a time: both its old and its new arrays are in memory meanwhile.
            compute(cache.arrays)

    def copy(self, length: int) -> "TreeSequence":
        """Another sequence with the KV of the first `length` committed tokens, or of a few less: see `reach`.

        `length` is positive.
        """
        length = self.reach(length)
        other = TreeSequence(self._network, self.level, self._encodings, self.tap)
        other._table = self._table.copy()
        other._table.truncate(length)
        other._layers = alike(self._layers, [cache.copy(other._table.size) for cache in self.caches])
        other._use(flat(other._layers))
        other._tokens = list(self._tokens)
        other._cut_states(length)
        other._compute()
        return other

    def layout(self, capacity: int) -> ArenaLayout | None:
        """Layout of an arena for `capacity` rows of this sequence, after a forward; None if no arena can hold them."""
        forms = {cache.row_form for cache in self._rows}
        form = forms.pop() if forms else None
        if self._folding or forms or form is None or form.element not in ELEMENT_TYPES:
            return None
        return ArenaLayout(len(self._rows), form.heads, capacity, form.size, ELEMENT_TYPES[form.element])

    def export(self, begin: int, end: int) -> tuple[LayerRows, LayerRows]:
        """Keys and values of committed tokens [begin, end), in the tokens' order.

        They may be views, valid until the next evaluation, which may write to them, or be slower while they exist.
        """
        assert begin < end
        slots = self._table.committed_slots(begin, end)
        first, last = int(slots[0]), int(slots[-1])
        where: Any = slice(first, last + 1) if last - first == end - begin - 1 else mx.array(slots)
        keys, values = zip(*(cache.rows(where) for cache in self._rows), strict=True)
        rows = to_numpy([*keys, *values])
        return rows[: len(keys)], rows[len(keys) :]

    def adopt(
        self, keys: Sequence[NDArray[Any]], values: Sequence[NDArray[Any]], tokens: int, element: ElementType
    ) -> None:
        """Adopt the KV of `tokens` committed tokens; the sequence must be empty.

        Rows behind them, if the arrays have more, are room to grow into. The arrays are copied.
        """
        assert not self._table.size
        for cache, layer_keys, layer_values in zip(self._rows, keys, values, strict=True):
            cache.adopt(to_mlx(layer_keys, element), to_mlx(layer_values, element))
        self._table.append(tokens)

    @property
    def row_bytes(self) -> int | None:
        """Of a token's keys and values in all layers, after a forward; None if those of a layer differ in form."""
        forms = [cache.row_form for cache in self._rows]
        sizes = [2 * form.heads * form.size * form.element.size for form in forms if form is not None]
        return sum(sizes) if len(sizes) == len(forms) else None

    def make_up(self, tokens: int) -> None:
        """After a forward, without rows: let so many tokens be committed, with zeros for keys and values. `row_bytes`
        is not None. What is computed behind them means nothing, but takes as long as behind others."""
        for cache in self._rows:
            form = cache.row_form
            assert form is not None
            zeros = mx.zeros((1, form.heads, tokens, form.size), form.element)
            cache.adopt(zeros, zeros)
        self._table.append(tokens - self._table.committed)

    def slots(self, begin: int, end: int) -> NDArray[np.int64]:
        """Slots of committed tokens [begin, end), in the tokens' order."""
        return self._table.committed_slots(begin, end)

    def resumed(self, tokens: Sequence[int]) -> None:
        """The caches of this empty sequence now hold these committed tokens."""
        assert not self._table.size
        self._table.append(len(tokens))
        self._tokens = list(tokens)

    def _use(self, caches: list[LayerCache]) -> None:
        self.caches = caches
        """All layers' caches."""
        self._rows = [cache for cache in caches if isinstance(cache, FullAttentionCache)]
        self._folding = [cache for cache in caches if isinstance(cache, FoldingCache)]
        self._given = self.alike([cache.given for cache in caches])
        """What mlx-lm's model gets."""

    def _shape(self, parents: Sequence[int], first: int | None = None, replaced: int = 0) -> ForwardShape:
        """Of a forward over new rows, or over committed tokens and new rows."""
        if first is not None and replaced:
            return self._replacing(parents, first, replaced)
        if len(parents) == 1 and self._table.size >= _MASK_COSTS and self._table.only_dead_slots_mask(parents[0]):
            self._compact()
        rows = self._table.add(parents)
        before = self._table.parent_slots(rows) if self._folding else None
        if self._table.continues(rows):
            return self._chain(rows[0].slot, len(rows))._replace(parents=before)
        assert self.level == "tree", "this model evaluates one path"
        return self._scattered(rows[0].slot, [row.position for row in rows], self._table.mask(rows), before)

    def _replacing(self, parents: Sequence[int], first: int, count: int) -> ForwardShape:
        assert self.level == "tree", "this model evaluates one path"
        assert not self._folding, "a recurrence forgets what was in front of a token"
        begin = self._table.replace(first, count)
        rows, length = self._table.add(parents), count + len(parents)
        plain = begin == first and self._table.origin == 0
        if plain and (not rows or (rows[0].slot == rows[0].position and self._table.continues(rows))):
            return self._chain(begin, length)
        start = self._table.origin + first
        positions = [*range(start, start + count), *(row.position for row in rows)]
        mask = self._table.committed_mask(first)
        return self._scattered(begin, positions, np.concatenate([mask, self._table.mask(rows)]) if rows else mask)

    def _scattered(
        self, begin: int, positions: list[int], mask: Any, parents: tuple[int, ...] | None = None
    ) -> ForwardShape:
        """Tokens at positions that are not their slots. `mask`: see `SlotTable`."""
        slots: Any = self._table.positions()
        first_seen = {window: self._table.slot_of(min(positions) - window + 1) for window in self._windows}
        where = mx.array(positions), mx.array(mask), parents, mx.array(slots)
        return ForwardShape(begin, len(positions), *where, first_seen)

    def _chain(self, begin: int, length: int) -> ForwardShape:
        """Tokens that see every slot before them, at the positions that are their slots."""
        first_seen = {window: max(0, begin - window + 1) for window in self._windows}
        return ForwardShape(begin, length, mask="causal" if length > 1 else None, first_seen=first_seen)

    def _prepare(self, forward: ForwardShape) -> ForwardShape:
        for cache in self.caches:
            cache.prepare(forward)
        return forward

    def _logits(self, tokens: Tokens, forward: ForwardShape) -> mx.array:
        """(L, V), of a forward of this shape over `tokens`."""
        if self.level == "tree":
            return self._evaluated(tokens, forward)
        assert not isinstance(tokens, mx.array), "below level tree, tokens may be evaluated again"
        missing = self._cut(forward.begin) if self._folding else []
        if missing and (self.level == "plain" or len(missing) > _MOST_TOGETHER):
            self._repeat(missing, forward.begin)
            missing = []
        if missing:
            forward = self._chain(forward.begin - len(missing), len(missing) + forward.length)
        self._tokens[forward.begin :] = [*missing, *tokens]
        logits = self._evaluated([*missing, *tokens], forward)[len(missing) :]
        self.recorded = self.recorded and self.recorded.part(len(missing))
        return logits

    def _evaluated(self, tokens: Tokens, forward: ForwardShape) -> mx.array:
        self._prepare(forward)
        with reading(), processor_operations():
            inputs = tokens[None] if isinstance(tokens, mx.array) else mx.array([list(tokens)])
            logits = mx.flatten(self._network(inputs, cache=self._given), 0, -2)
        for cache in self._folding:
            cache.finish()
        self.recorded = self.tap and self.tap.take()
        return logits

    def _commit(self, path: Sequence[int], surviving: Sequence[int]) -> None:
        committed, live = ([self._table.row(row).slot for row in rows] for rows in (path, surviving))
        for cache in self._folding:
            cache.commit(committed, live)

    def _cut_states(self, length: int) -> None:
        """Let the caches that have not all rows go back to these tokens, where they can."""
        for cache in self._rows:
            cache.cut(length)
        for cache in self._folding if self.level == "tree" else ():
            cache.cut(length)

    def _cut(self, slots: int) -> list[int]:
        """Let the caches go back to these slots, or to earlier ones; the tokens that they forget beyond that."""
        reach = self.reach(slots)
        for cache in self._folding:
            cache.cut(reach)
        return self._tokens[reach:slots]

    def _repeat(self, tokens: Sequence[int], end: int) -> None:
        """Evaluate tokens again, the last of which is in the slot before `end`."""
        width = 1 if self.level == "plain" else len(tokens)
        for index in range(0, len(tokens), width):
            self._logits(tokens[index : index + width], self._chain(end - len(tokens) + index, width))
        self._compute()

    def _compute(self) -> None:
        compute([cache.arrays for cache in self.caches], self.recorded and self.recorded.rows)

    def _compact(self) -> None:
        begin, slots = self._table.compact()
        if len(slots):
            moved = mx.array(slots)
            for cache in self.caches:
                cache.move(begin, moved)


def as_array(tokens: Tokens) -> mx.array:
    """(L,)."""
    return tokens if isinstance(tokens, mx.array) else mx.array(list(tokens))


def to_numpy(rows: Sequence[mx.array]) -> LayerRows:
    """(heads, rows, size) of each (1, heads, rows, size), as views of its own memory where that is possible;
    bfloat16 as its bits.

    While a view exists, MLX copies its array before it writes to it, and whole layers write to it: drop the views soon.
    """
    plain = [array.view(mx.uint16) if array.dtype == mx.bfloat16 else array for array in rows]
    compute(plain)
    return [np.asarray(array)[0] for array in plain]


def to_mlx(rows: NDArray[Any], element: ElementType) -> mx.array:
    """A copy, (1, heads, rows, size). The rows may be part of a bigger array."""
    # MLX takes an array with gaps element by element; numpy closes the gaps faster.
    array = mx.array(np.ascontiguousarray(rows[None]))
    return array.view(mx.bfloat16) if element is ElementType.BFLOAT16 else array
