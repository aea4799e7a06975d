"""EAGLE-3 as a converted package: rows that read features, in calls of fixed width. Knows no trees and no sampling.

What a row leaves is one vector: the state that the next row may read, then the row's logits, which the same call makes.
"""

from collections.abc import Iterable, Iterator, Sequence

import mlx.core as mx
import numpy as np

from draft_worker.conditioned.runner import Input, Wave
from draft_worker.coreml.arrays import Single
from draft_worker.coreml.converted import Converted
from draft_worker.coreml.package import Package
from draft_worker.coreml.runtime.calls import FeatureReader, PackageForward, Runtime
from draft_worker.coreml.runtime.memory import CachePool, CallPart, HostMemory
from draft_worker.projection import ProjectionMatrix
from protocol.contracts.drafters.description import Eagle3Form
from protocol.kv.exchange import KvExchange
from protocol.messages.features import FeatureForm

_MOST_TREE = 256
"""More slots for a tree help no draft."""


_MOST = 3e4
"""As in MLX: larger states don't survive a product in half precision."""


class PackageRows(HostMemory):
    """The keys and values of one sequence on the host. A part of the slots is for the tree alone."""

    def __init__(self, pool: CachePool) -> None:
        super().__init__(pool)
        self._most_rows = max(2, min(_MOST_TREE, pool.package.context // 8))
        self.most_committed = pool.package.context - self._most_rows

    @property
    def room(self) -> int:
        """Rows of the tree that the next forward may add."""
        return self._most_rows - (self.slots.taken - self.slots.committed)

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        unwritten = self.commit(path, surviving)
        assert not unwritten, "the tree has slots of its own"

    def skip(self, count: int) -> None:
        """Give the next `count` row numbers to no row."""
        self.slots.next_row += count

    def copy(self, length: int) -> "PackageRows":
        """Another sequence with the keys and values of the first `length` committed tokens."""
        other = PackageRows(self._pool)
        other.begin_with(self, length)
        return other

    def part(self, wave: Wave) -> CallPart:
        """The rows of a wave of this sequence, added to it."""
        count = len(wave.tokens) - len(wave.parents)
        again = range(0) if wave.first is None else range(wave.first, wave.first + count)
        if again:
            self.exchange(self.slots.replace(again.start, count))
        assert len(wave.parents) <= self.room, "the tree has no slot left"
        return CallPart(self, wave.tokens, self.slots.add(wave.tokens[count:], wave.parents), again)


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
        self._forward = PackageForward(package, tables, runtime)
        self._reader = FeatureReader(package, tables, runtime)
        self._pool = CachePool(package, exchange)

    def open(self) -> PackageRows:
        return PackageRows(self._pool)

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
        found, first = [], 0
        for piece in _rows(wave).part(wave).pieces(self.widest):
            found.append(self._call([piece], given[first : first + len(piece.tokens)]))
            first += len(piece.tokens)
        return mx.array(np.concatenate(found))

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
        return self._forward.joins([(_rows(wave), len(wave.tokens)) for wave in waves])

    def _together(self, group: Sequence[tuple[Wave, Single]]) -> list[mx.array]:
        if len(group) == 1:
            return [self.evaluate(*group[0])]
        ends = np.cumsum([len(wave.tokens) for wave, _ in group])
        left = self._call([_rows(wave).part(wave) for wave, _ in group], np.concatenate([given for _, given in group]))
        return [mx.array(each) for each in np.split(left, ends[:-1])]

    def _call(self, parts: Sequence[CallPart], given: Single) -> Single:
        """(L, width), what the rows of the parts leave, one after the other."""
        outputs = self._forward.run(parts, given)
        logits = self._forward.logits(outputs, range(len(given)))[:, : self._forward.head_rows]
        return np.concatenate([_bounded(outputs["state"][0, 0, : len(given)]), np.nan_to_num(logits, nan=0.0)], axis=1)


def _rows(wave: Wave) -> PackageRows:
    assert isinstance(wave.rows, PackageRows)
    return wave.rows


def _form(package: Package) -> Eagle3Form:
    form = None if package.conditioning is None else package.conditioning.eagle3
    assert form is not None, "a package of EAGLE-3 states its form"
    return form


def _bounded(states: Single) -> Single:
    return np.clip(np.nan_to_num(states.astype(np.float32), nan=0.0), -_MOST, _MOST)
