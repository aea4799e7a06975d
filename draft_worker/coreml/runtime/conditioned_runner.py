"""EAGLE-3 as a converted package: rows that read features, in calls of fixed width. Knows no trees and no sampling.

What a row leaves is one vector: the state that the next row may read, then the row's logits, which the same call makes.

Assigns KV slots to committed tokens, whose rows may be computed again, and to the rows of a tree behind them.

The slots are bookkeeping alone. A committed token may be in any slot, so that nothing moves.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from draft_worker.conditioned.runner import Input, Wave
from draft_worker.coreml.arrays import Single, Slots
from draft_worker.coreml.converted import Converted
from draft_worker.coreml.package import Package
from draft_worker.coreml.runtime.cache_pool import CachePool
from draft_worker.coreml.runtime.call_inputs import CallInputs
from draft_worker.coreml.runtime.feature_reader import FeatureReader
from draft_worker.coreml.runtime.interface import Runtime
from draft_worker.coreml.runtime.joint_memory import JointMemory, JointPart
from draft_worker.coreml.runtime.tree_slots import HIDDEN
from draft_worker.drafters.eagle3 import Eagle3Form
from protocol.messages.features import FeatureForm

_MOST_TREE = 256
"""More slots for a tree help no draft."""


class SlotRow(NamedTuple):
    """A row of the tree."""

    slot: int
    parent: int
    position: int


class CallRow(NamedTuple):
    """A row that a call computes."""

    slot: int
    position: int
    row: int | None
    """Its number in the tree; None: a committed token."""


class ReplaceableSlots:
    """The slots of one sequence. Row numbers are never reused. Mistakes of the caller fail an assertion."""

    def __init__(self, capacity: int) -> None:
        """A part of the slots is only for the tree, the others are only for committed tokens, `most_committed`."""
        self.most_rows = max(2, min(_MOST_TREE, capacity // 8))
        self.most_committed = capacity - self.most_rows
        self.next_row = 0
        self.origin = 0
        """Position of the first committed token."""
        self._capacity = capacity
        self._order: list[int] = []
        """Slots of the committed tokens, in the order of the tokens."""
        self._rows: dict[int, SlotRow] = {}
        self._free = list(range(capacity))

    @property
    def committed(self) -> int:
        return len(self._order)

    @property
    def room(self) -> int:
        """Rows of the tree that can be added now."""
        return self.most_rows - len(self._rows)

    @property
    def slots(self) -> Sequence[int]:
        """Those of the committed tokens, in their order."""
        return self._order

    @property
    def taken(self) -> int:
        """Slots of committed tokens and of rows."""
        return len(self._order) + len(self._rows)

    @property
    def used(self) -> Slots:
        """These slots."""
        return np.array([*self._order, *(row.slot for row in self._rows.values())], np.intp)

    def position(self, row: int) -> int:
        return self._rows[row].position

    def replace(self, first: int, count: int) -> list[CallRow]:
        """`count` rows of committed tokens, in place of those from index `first` on."""
        kept = self._order[: first + count]
        self._release(self._order[first + count :])
        self._order = kept + [self._take() for _ in range(first + count - len(kept))]
        return [CallRow(self._order[index], self.origin + index, None) for index in range(first, first + count)]

    def add(self, parents: Sequence[int]) -> list[CallRow]:
        """New rows, parents before children. -1: the parent is the last committed token. At most `room`."""
        assert len(parents) <= self.room, "the tree has no slot left"
        added = []
        for parent in parents:
            above = self._rows.get(parent)
            position = self.origin + self.committed if above is None else above.position + 1
            self._rows[self.next_row] = SlotRow(self._take(), parent, position)
            added.append(CallRow(self._rows[self.next_row].slot, position, self.next_row))
            self.next_row += 1
        return added

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        """Commit the rows of `path` in order, keep those in `surviving`, drop the rest."""
        kept = set(surviving)
        self._order += [self._rows[row].slot for row in path]
        self._release(row.slot for number, row in self._rows.items() if number not in kept and number not in set(path))
        self._rows = {number: row for number, row in self._rows.items() if number in kept}

    def truncate(self, length: int) -> None:
        """Drop the committed tokens behind the first `length`, and all rows."""
        self._release([*self._order[length:], *(row.slot for row in self._rows.values())])
        del self._order[length:]
        self._rows = {}

    def restart(self, position: int) -> None:
        """Drop all committed tokens: the next one stands at `position`. Rows stay."""
        self._release(self._order)
        self._order, self.origin = [], position

    def fill_mask(self, call: Sequence[CallRow], mask: Single) -> None:
        """Fill (width, capacity + width) `mask` for a call that computes these rows: committed ones, which are the last
        so far, in front of rows of the tree.

        0 at what a row sees, HIDDEN elsewhere: the tokens before it, by their slots or, if they are in the call, by
        their columns behind the slots.
        """
        mask[:] = HIDDEN
        fresh = sum(each.row is None for each in call)
        before = self._order[: self._first(call)]
        columns = {each.row: self._capacity + index for index, each in enumerate(call) if each.row is not None}
        for index, each in enumerate(call):
            mask[index, before] = 0
            mask[index, self._capacity : self._capacity + min(index + 1, fresh)] = 0
            number = each.row
            while number is not None and (row := self._rows.get(number)) is not None:
                mask[index, columns.get(number, row.slot)] = 0
                number = row.parent

    def _first(self, call: Sequence[CallRow]) -> int:
        """Index of the first committed token in the call."""
        return call[0].position - self.origin if call[0].row is None else self.committed

    def _take(self) -> int:
        assert self._free, "committed tokens leave room for the tree"
        return heapq.heappop(self._free)

    def _release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            heapq.heappush(self._free, slot)


_MOST = 3e4
"""As in MLX: larger states don't survive a product in half precision."""


class PackageRows:
    """The keys and values of one sequence on the host, and which slot has whose."""

    def __init__(self, pool: CachePool, capacity: int) -> None:
        self.table = ReplaceableSlots(capacity)
        self._pool = pool
        self._capacity = capacity
        self._cache = pool.acquire()
        self.stamps: Slots = np.zeros(capacity, np.intp)
        """As `HostMemory.stamps`."""
        self._changes = 0

    @property
    def kv(self) -> Single:
        """The input of a call."""
        return self._cache.kv

    @property
    def next_row(self) -> int:
        return self.table.next_row

    @property
    def room(self) -> int:
        """Rows of the tree that the next forward may add."""
        return self.table.room

    @property
    def memory(self) -> int:
        return self._cache.array.nbytes

    def position(self, row: int) -> int:
        return self.table.position(row)

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        self.table.keep(path, surviving)

    def truncate(self, length: int) -> None:
        self.table.truncate(length)

    def restart(self, position: int) -> None:
        self.table.restart(position)

    def skip(self, count: int) -> None:
        """Give the next `count` row numbers to no row."""
        self.table.next_row += count

    def copy(self, length: int) -> "PackageRows":
        """Another sequence with the keys and values of the first `length` committed tokens."""
        other = PackageRows(self._pool, self._capacity)
        other.table.origin = self.table.origin
        places = [row.slot for row in other.table.replace(0, length)]
        other._cache.array[:, :, places] = self._cache.array[:, :, self.table.slots[:length]]
        return other

    def write(self, rows: Sequence[CallRow], new: Single) -> None:
        """The keys and values of these rows, from the output of their call."""
        # A NaN would spoil every later row, even one that may not see it.
        slots = [row.slot for row in rows]
        self._cache.array[: len(new), :, slots] = _finite(new)
        self._changes += 1
        self.stamps[slots] = self._changes

    def close(self) -> None:
        self._pool.release(self._cache)


class _Part(NamedTuple):
    """Rows of one sequence that a call evaluates."""

    rows: PackageRows
    tokens: Sequence[int]
    placed: Sequence[CallRow]
    given: Single
    """(L, hidden), their second inputs."""

    @classmethod
    def of(cls, wave: Wave, given: Single) -> "_Part":
        """The rows of a wave, added to its sequence."""
        rows, committed = _rows(wave), len(wave.tokens) - len(wave.parents)
        placed = rows.table.replace(wave.first, committed) if wave.first is not None else []
        return cls(rows, wave.tokens, [*placed, *rows.table.add(wave.parents)], given)

    def at_most(self, widest: int) -> "Iterator[_Part]":
        """The rows in parts of at most so many."""
        for begin in range(0, len(self.tokens), widest):
            rows = slice(begin, begin + widest)
            yield _Part(self.rows, self.tokens[rows], self.placed[rows], self.given[rows])

    @property
    def joint(self) -> JointPart:
        return JointPart(self.rows, self.rows.table.used, [row.slot for row in self.placed], self.fill_mask)

    def fill_mask(self, mask: Single, window: int | None = None) -> None:
        assert window is None, "a drafter of this kind has no windows"
        self.rows.table.fill_mask(self.placed, mask)


class PackageRunner:
    """A `ConditionedRunner`: the functions of one package and their buffers, which all sequences share."""

    def __init__(self, converted: Converted, runtime: Runtime) -> None:
        package, tables, form = converted.package, converted.tables, _form(converted.package)
        self.features = FeatureForm(form.outputs, form.target_width)
        self.width = package.shape.hidden + package.head_rows
        self.vocabulary = package.shape.vocabulary
        self.context = package.context
        self.architecture = package.shape.architecture
        self.held_feature = form.held_feature
        self.head_tokens = tables.head_tokens
        self.device = runtime.device
        self.joint = True
        self.widest = package.widths[-1]
        self._hidden = package.shape.hidden
        self._package = package
        self._runtime = runtime
        self._inputs = {width: CallInputs(package, tables, width) for width in package.widths}
        self._reader = FeatureReader(package, tables, runtime)
        self._pool = CachePool(package, None)
        self._joint = JointMemory(package)

    def open(self) -> PackageRows:
        return PackageRows(self._pool, self.context)

    def forward(self, waves: Sequence[Wave]) -> list[mx.array]:
        given = self._second_inputs([each for wave in waves for each in wave.inputs])
        inputs = np.split(given, np.cumsum([len(wave.tokens) for wave in waves])[:-1])
        groups = self._groups(list(zip(waves, inputs, strict=True)))
        return [left for group in groups for left in self._together(group)]

    def logits(self, outputs: mx.array) -> mx.array:
        return outputs[:, self._hidden :]

    def costs(self, loading: float) -> tuple[tuple[int, float], ...]:
        return ()

    def fuse(self, features: Single) -> Single:
        """(L, hidden) of (L, outputs * width) features."""
        parts = [outputs["fused"][0, 0, :count] for count, outputs in self._reader.read(features, ())]
        return _bounded(np.concatenate(parts))

    def evaluate(self, wave: Wave, given: Single) -> mx.array:
        """(L, width), what the rows leave. `given`: their (L, hidden) second inputs."""
        return mx.array(np.concatenate([self._call([part])[0] for part in _Part.of(wave, given).at_most(self.widest)]))

    def states(self, outputs: mx.array) -> Single:
        """(..., hidden), the second inputs of rows behind those that left this."""
        return np.asarray(outputs[..., : self._hidden])

    def _second_inputs(self, inputs: Sequence[Input]) -> Single:
        """(L, hidden)."""
        given = np.zeros((len(inputs), self._hidden), np.float32)
        features = [place for place, each in enumerate(inputs) if isinstance(each, np.ndarray)]
        if features:
            given[features] = self.fuse(np.stack([np.asarray(inputs[place]) for place in features]))
        for place, each in enumerate(inputs):
            if isinstance(each, mx.array):
                given[place] = self.states(each)
        return given

    def _groups(self, waves: Sequence[tuple[Wave, Single]]) -> Iterator[list[tuple[Wave, Single]]]:
        """Neighbours that share a call."""
        group: list[tuple[Wave, Single]] = []
        for each in waves:
            if group and not self._fit([wave for wave, _ in (*group, each)]):
                yield group
                group = []
            group.append(each)
        yield group

    def _fit(self, waves: Sequence[Wave]) -> bool:
        needed = [(_rows(wave), _rows(wave).table.taken + len(wave.tokens)) for wave in waves]
        return sum(len(wave.tokens) for wave in waves) <= self.widest and self._joint.fits(needed)

    def _together(self, group: Sequence[tuple[Wave, Single]]) -> list[mx.array]:
        if len(group) == 1:
            self._joint.count_step()
            return [self.evaluate(*group[0])]
        return [mx.array(left) for left in self._call([_Part.of(*each) for each in group])]

    def _call(self, parts: Sequence[_Part]) -> list[Single]:
        """(L, width), what the rows of each part leave."""
        ends = list(accumulate(len(part.tokens) for part in parts))
        call = next(each for width, each in self._inputs.items() if width >= ends[-1])
        data = call.place(
            [token for part in parts for token in part.tokens], [row.position for part in parts for row in part.placed]
        )
        states, count = data["g"][0, :, 0], ends[-1]
        states[:, :count] = np.concatenate([part.given for part in parts]).T
        # Padding repeats a row, as in `CallInputs`.
        states[:, count:] = states[:, count - 1 : count]
        kv, fill_mask = self._cache(parts)
        for name in self._package.masks:
            fill_mask(data[name][0, 0])
        outputs = self._runtime.predict(call.function, {**data, "kv": kv})
        names = [f"logits_{index}" for index in range(len(self._package.outputs))]
        left = [_bounded(outputs["state"][0, 0, :count])]
        left += [np.nan_to_num(outputs[name][0, 0, :count].astype(np.float32), nan=0.0) for name in names]
        new = np.split(outputs["kv_new"][:, :, :count], ends[:-1], axis=2)
        for part, rows in zip(parts, new, strict=True):
            part.rows.write(part.placed, rows)
        return np.split(np.concatenate(left, axis=1), ends[:-1])

    def _cache(self, parts: Sequence[_Part]) -> tuple[Single, Callable[[Single], None]]:
        """The keys and values that a call of these parts reads, and what fills its mask."""
        if len(parts) == 1:
            return parts[0].rows.kv, parts[0].fill_mask
        joint = self._joint.call([part.joint for part in parts])
        return joint.kv, joint.fill_mask


def _rows(wave: Wave) -> PackageRows:
    assert isinstance(wave.rows, PackageRows)
    return wave.rows


def _form(package: Package) -> Eagle3Form:
    form = None if package.conditioning is None else package.conditioning.eagle3
    assert form is not None, "a package of EAGLE-3 states its form"
    return form


def _bounded(states: Single) -> Single:
    return np.clip(np.nan_to_num(states.astype(np.float32), nan=0.0), -_MOST, _MOST)


def _finite(rows: Single) -> Single:
    return np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)
