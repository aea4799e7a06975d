"""One sequence's KV in MLX: prefill, evaluate trees, keep what the target accepted. Knows no sampling."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from numpy.typing import NDArray

from protocol.inference.kv_rows import element_type, to_mlx, to_numpy
from protocol.inference.slots import SlotTable
from protocol.kv.arena import LayerRows
from protocol.kv.arena_header import ArenaLayout, ElementType

_DEAD_SLOTS = 64
"""Dead slots that are cheaper to close up than to attend past."""
_GROWTH = 256
"""Slots by which KV arrays grow, as in mlx-lm's own cache."""

MaskKind: TypeAlias = mx.array | Literal["causal"] | None


class ForwardShape(NamedTuple):
    """What one forward looks like from inside a model."""

    begin: int
    """Slot of its first token."""
    positions: mx.array | None
    """(L,) absolute positions, or None when they are begin, begin + 1, ..."""
    mask: MaskKind


class SlotCache:
    """One layer's keys and values, in the shape of an mlx-lm cache; `forward` is set before each forward."""

    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.forward = ForwardShape(0, None, None)
        self._end = 0

    @property
    def offset(self) -> int | ForwardShape:
        """A plain number wherever one says all, else the forward itself, which only a
        `PositionedRope` can read: anything that reckons with it fails instead of going wrong."""
        return self.forward.begin if self.forward.positions is None else self.forward

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> MaskKind:
        if window_size is not None:
            raise ValueError("sliding windows are not supported")
        if return_array and isinstance(self.forward.mask, str):
            return create_causal_mask(length, self.forward.begin)
        return self.forward.mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write (1, heads, L, size) from the forward's first slot on; all slots so far."""
        begin, end = self.forward.begin, self.forward.begin + keys.shape[2]
        self.keys = _written(self.keys, keys, begin, end)
        self.values = _written(self.values, values, begin, end)
        self._end = end
        return self.fetch()

    def fetch(self) -> tuple[mx.array, mx.array]:
        """All slots up to the last that was written."""
        return self.keys[..., : self._end, :], self.values[..., : self._end, :]

    def move(self, begin: int, slots: mx.array) -> None:
        """Bring the contents of `slots` to the slots from `begin` on."""
        end = begin + slots.size
        self.keys[..., begin:end, :] = mx.take(self.keys, slots, axis=2)
        self.values[..., begin:end, :] = mx.take(self.values, slots, axis=2)


class TreeSequence:
    """Committed tokens and, behind them, a tree of evaluated rows that may or may not be committed."""

    copyable = True
    """All of its KV is here."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self.caches = [SlotCache() for _ in network.layers]
        """One a layer."""
        self._table = SlotTable()

    @property
    def committed(self) -> int:
        """Tokens with committed KV."""
        return self._table.committed

    @property
    def memory(self) -> int:
        """Bytes of keys and values, room to grow included."""
        halves = [half for cache in self.caches for half in (cache.keys, cache.values)]
        return sum(half.nbytes for half in halves if half is not None)

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
        self._prepare(ForwardShape(begin, None, "causal" if len(tokens) > 1 else None))
        self._logits(tokens)
        mx.eval([(cache.keys, cache.values) for cache in self.caches])

    def evaluate(self, tokens: Sequence[int], parents: Sequence[int]) -> mx.array:
        """(L, V) logits, not yet computed, of tokens that become rows next_row, next_row + 1, ...

        A parent is a row's number, of an earlier call or of this one, or -1 for the committed tokens.
        """
        self.begin(parents)
        return self._logits(tokens)

    def begin(self, parents: Sequence[int]) -> ForwardShape:
        """Make rows for a forward, which every layer's cache is now ready for; see `evaluate`."""
        rows = self._table.add(parents)
        if self._table.continues(rows):
            return self._prepare(ForwardShape(rows[0].slot, None, "causal" if len(rows) > 1 else None))
        positions = mx.array([row.position for row in rows])
        mask: Any = self._table.mask(rows)
        return self._prepare(ForwardShape(rows[0].slot, positions, mx.array(mask)))

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        """Commit the rows of `path` in order, keep those in `surviving`, forget the others.

        The ancestors of what survives must be in `path` or survive. Row numbers stay valid.
        """
        self._table.keep(path, surviving)
        if self._table.dead >= _DEAD_SLOTS:
            self._compact()

    def truncate(self, length: int) -> None:
        """Forget committed tokens behind the first `length`, and all rows."""
        self._table.truncate(length)

    def copy(self, length: int) -> "TreeSequence":
        """Another sequence with the KV of the first `length` committed tokens, of which there are some."""
        other = TreeSequence(self._network)
        other._table = self._table.copy()
        other.truncate(length)
        slots = other._table.size
        for mine, theirs in zip(self.caches, other.caches, strict=True):
            # An array written to in place would change under both: each has its own.
            theirs.keys, theirs.values = (
                mx.contiguous(mine.keys[..., :slots, :]),
                mx.contiguous(mine.values[..., :slots, :]),
            )
        mx.eval([(cache.keys, cache.values) for cache in other.caches])
        return other

    def layout(self, capacity: int) -> ArenaLayout | None:
        """The arena that holds `capacity` rows of this sequence, which has some; None if no arena can."""
        shapes = {half.shape[1::2] for cache in self.caches for half in (cache.keys, cache.values)}
        kind = element_type(self.caches[0].keys)
        if len(shapes) != 1 or kind is None:
            return None
        ((heads, size),) = shapes
        return ArenaLayout(len(self.caches), heads, capacity, size, kind)

    def export(self, begin: int, end: int) -> tuple[LayerRows, LayerRows]:
        """Keys and values of committed tokens [begin, end), in the tokens' order.

        They may be views: they hold until the next evaluation, which is slower while they live.
        """
        assert begin < end
        slots = self._table.committed_slots(begin, end)
        first, last = int(slots[0]), int(slots[-1])
        where: Any = slice(first, last + 1) if last - first == end - begin - 1 else mx.array(slots)
        halves = [cache.keys for cache in self.caches] + [cache.values for cache in self.caches]
        rows = to_numpy([half[0][:, where] for half in halves])
        return rows[: len(self.caches)], rows[len(self.caches) :]

    def adopt(
        self, keys: Sequence[NDArray[Any]], values: Sequence[NDArray[Any]], tokens: int, kind: ElementType
    ) -> None:
        """Take over the KV of `tokens` committed tokens; the sequence must be empty.

        Rows behind them, if the arrays have more, are room to grow into. The arrays are copied.
        """
        assert not self._table.size
        for cache, layer_keys, layer_values in zip(self.caches, keys, values, strict=True):
            cache.keys, cache.values = to_mlx(layer_keys[None], kind), to_mlx(layer_values[None], kind)
        self._table.append(tokens)

    def _prepare(self, forward: ForwardShape) -> ForwardShape:
        for cache in self.caches:
            cache.forward = forward
        return forward

    def _logits(self, tokens: Sequence[int]) -> mx.array:
        return self._network(mx.array([tokens]), cache=self.caches)[0]

    def _compact(self) -> None:
        begin, slots = self._table.compact()
        if len(slots):
            moved = mx.array(slots)
            for cache in self.caches:
                cache.move(begin, moved)


def _written(held: mx.array | None, new: mx.array, begin: int, end: int) -> mx.array:
    """`held` with `new` at [begin, end) of axis 2, grown by whole steps where it is too short."""
    capacity = 0 if held is None else held.shape[2]
    grown = held
    if held is None or end > capacity:
        batch, heads, _, size = new.shape
        more = mx.zeros((batch, heads, -(-end // _GROWTH) * _GROWTH - capacity, size), new.dtype)
        grown = more if held is None else mx.concatenate([held, more], axis=2)
    assert grown is not None
    grown[..., begin:end, :] = new
    return grown
