"""EAGLE-3 as a converted package: rows that read features, in calls of fixed width. Knows no trees and no sampling.

What a row leaves is one vector: the state that the next row may read, then the row's logits, which the same call makes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from draft_worker.conditioned.runner import Input, Wave
from draft_worker.coreml.arrays import Single
from draft_worker.coreml.converted import Converted
from draft_worker.coreml.package import Package
from draft_worker.coreml.runtime.calls import CallInputs, FeatureReader, Runtime
from draft_worker.coreml.runtime.joint_memory import JointMemory, JointPart
from draft_worker.coreml.runtime.memory import CachePool
from draft_worker.projection import ProjectionMatrix
from protocol.contracts.drafters.description import Eagle3Form
from protocol.kv.exchange import KvExchange
from protocol.messages.features import FeatureForm
from protocol.messages.kv import KvReference

_MOST_TREE = 256
"""More slots for a tree help no draft."""


_MOST = 3e4
"""As in MLX: larger states don't survive a product in half precision."""


class PackageRows:
    """The keys and values of one sequence on the host. A part of the slots is for the tree alone."""

    def __init__(self, pool: CachePool, capacity: int) -> None:
        self._pool = pool
        self._capacity = capacity
        self._most_rows = max(2, min(_MOST_TREE, capacity // 8))
        self.most_committed = capacity - self._most_rows
        self._cache = pool.acquire()
        self.host = pool.memory(self._cache)

    @property
    def next_row(self) -> int:
        return self.host.slots.next_row

    @property
    def room(self) -> int:
        """Rows of the tree that the next forward may add."""
        slots = self.host.slots
        return self._most_rows - (slots.taken - slots.committed)

    @property
    def memory(self) -> int:
        return self.host.size

    def position(self, row: int) -> int:
        return self.host.slots.row(row).position

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        kept = self.host.slots.keep(path, surviving)
        assert not kept.unwritten, "the tree has slots of its own"
        self.host.exchange(kept.exchanged)

    def truncate(self, length: int) -> None:
        self.host.slots.truncate(length)
        self._cache.truncate(length)

    def restart(self, position: int) -> None:
        self.host.slots.restart(position)
        self._cache.truncate(0)

    @property
    def size(self) -> int:
        return self._cache.size

    def save(self, count: int) -> KvReference | None:
        return self._cache.save(count)

    def adopt(self, reference: KvReference, count: int) -> None:
        cache = self._pool.adopt(reference)
        self._pool.release(self._cache)
        self._cache = cache
        self._cache.truncate(count)
        self.host = self._pool.memory(cache)
        self.host.slots.adopt(count)

    def skip(self, count: int) -> None:
        """Give the next `count` row numbers to no row."""
        self.host.slots.next_row += count

    def copy(self, length: int) -> "PackageRows":
        """Another sequence with the keys and values of the first `length` committed tokens."""
        other = PackageRows(self._pool, self._capacity)
        other.host.slots.origin = self.host.slots.origin
        other.host.slots.adopt(length)
        other._cache.array[:, :, :length] = self._cache.array[:, :, :length]
        return other

    def close(self) -> None:
        self._pool.release(self._cache)


class _Part(NamedTuple):
    """Rows of one sequence that a call evaluates: committed tokens, then rows of the tree."""

    rows: PackageRows
    tokens: Sequence[int]
    committed: range
    """Their indices, which are their slots."""
    tree: Sequence[int]
    given: Single
    """(L, hidden), their second inputs."""

    @classmethod
    def of(cls, wave: Wave, given: Single) -> "_Part":
        """The rows of a wave, added to its sequence."""
        rows, count = _rows(wave), len(wave.tokens) - len(wave.parents)
        committed = range(0) if wave.first is None else range(wave.first, wave.first + count)
        if committed:
            rows.host.exchange(rows.host.slots.replace(committed.start, count))
        assert len(wave.parents) <= rows.room, "the tree has no slot left"
        return cls(rows, wave.tokens, committed, rows.host.slots.add(wave.tokens[count:], wave.parents), given)

    def at_most(self, widest: int) -> "Iterator[_Part]":
        """The rows in parts of at most so many."""
        for begin in range(0, len(self.tokens), widest):
            part, first = slice(begin, begin + widest), len(self.committed)
            tree = self.tree[max(0, begin - first) : max(0, begin + widest - first)]
            yield _Part(self.rows, self.tokens[part], self.committed[part], tree, self.given[part])

    @property
    def positions(self) -> list[int]:
        origin = self.rows.host.slots.origin
        return [*(origin + index for index in self.committed), *map(self.rows.position, self.tree)]

    @property
    def slots(self) -> list[int]:
        return [*self.committed, *self.rows.host.slots.slots_of(self.tree)]

    @property
    def joint(self) -> JointPart:
        return JointPart(self.rows.host, self.rows.host.slots.used, self.slots, self.fill_mask)

    def fill_mask(self, mask: Single, window: int | None = None) -> None:
        assert window is None, "a drafter of this kind has no windows"
        self.rows.host.slots.fill_mask(self.tree, mask, again=self.committed)


class PackageRunner:
    """A `ConditionedRunner`: the functions of one package and their buffers, which all sequences share."""

    def __init__(self, converted: Converted, runtime: Runtime, exchange: KvExchange | None = None) -> None:
        """`exchange`: as for a block drafter's package."""
        package, tables, form = converted.package, converted.tables, _form(converted.package)
        self.features = FeatureForm(form.outputs, form.output_width)
        self.matrix: ProjectionMatrix | None = None
        self.width = package.shape.hidden + package.head_rows
        self.vocabulary = package.shape.vocabulary
        self.context = package.context
        self.architecture = package.shape.architecture
        self.head_tokens = tables.head_tokens
        self.short_head = None
        self.device = runtime.device
        self.joint = True
        self.widest = package.widths[-1]
        self._hidden = package.shape.hidden
        self._package = package
        self._runtime = runtime
        self._inputs = {width: CallInputs(package, tables, width) for width in package.widths}
        self._reader = FeatureReader(package, tables, runtime)
        self._pool = CachePool(package, exchange)
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
        needed = [(_rows(wave).host, _rows(wave).host.slots.taken + len(wave.tokens)) for wave in waves]
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
            [token for part in parts for token in part.tokens], [each for part in parts for each in part.positions]
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
            part.rows.host.write(part.slots, rows)
        return np.split(np.concatenate(left, axis=1), ends[:-1])

    def _cache(self, parts: Sequence[_Part]) -> tuple[Single, Callable[[Single], None]]:
        """The keys and values that a call of these parts reads, and what fills its mask."""
        if len(parts) == 1:
            return parts[0].rows.host.kv, parts[0].fill_mask
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
