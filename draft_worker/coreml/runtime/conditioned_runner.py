"""EAGLE-3 as a converted package: rows that read features, in calls of fixed width. Knows no trees and no sampling.

What a row leaves is one vector: the state that the next row may read, then the row's logits, which the same call makes.
"""

from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from draft_worker.conditioned.runner import Input, Wave
from draft_worker.coreml.arrays import Single
from draft_worker.coreml.converted import Converted
from draft_worker.coreml.package import Package
from draft_worker.coreml.runtime.cache_pool import CachePool
from draft_worker.coreml.runtime.call_inputs import CallInputs
from draft_worker.coreml.runtime.feature_reader import FeatureReader
from draft_worker.coreml.runtime.interface import Runtime
from draft_worker.coreml.runtime.replaceable_slots import CallRow, ReplaceableSlots
from draft_worker.drafters.eagle3 import Eagle3Form
from protocol.messages.features import FeatureForm

_MOST = 3e4
"""As in MLX: larger states don't survive a product in half precision."""


class PackageRows:
    """The keys and values of one sequence on the host, and which slot has whose."""

    def __init__(self, pool: CachePool, capacity: int) -> None:
        self.table = ReplaceableSlots(capacity)
        self._pool = pool
        self._capacity = capacity
        self._cache = pool.acquire()

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
        self._cache.array[: len(new), :, [row.slot for row in rows]] = _finite(new[:, :, : len(rows)])

    def close(self) -> None:
        self._pool.release(self._cache)


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
        self.joint = False
        self._hidden = package.shape.hidden
        self._package = package
        self._runtime = runtime
        self._inputs = {width: CallInputs(package, tables, width) for width in package.widths}
        self._reader = FeatureReader(package, tables, runtime)
        self._pool = CachePool(package, None)

    def open(self) -> PackageRows:
        return PackageRows(self._pool, self.context)

    def forward(self, waves: Sequence[Wave]) -> list[mx.array]:
        return [self.evaluate(wave, self._second_inputs(wave.inputs)) for wave in waves]

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
        rows, tokens = wave.rows, wave.tokens
        assert isinstance(rows, PackageRows)
        committed = len(tokens) - len(wave.parents)
        placed = rows.table.replace(wave.first, committed) if wave.first is not None else []
        placed += rows.table.add(wave.parents)
        widest = self._package.widths[-1]
        parts = [
            self._call(
                rows, tokens[begin : begin + widest], placed[begin : begin + widest], given[begin : begin + widest]
            )
            for begin in range(0, len(tokens), widest)
        ]
        return mx.array(np.concatenate(parts))

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

    def _call(self, rows: PackageRows, tokens: Sequence[int], placed: Sequence[CallRow], given: Single) -> Single:
        count = len(tokens)
        call = next(each for width, each in self._inputs.items() if width >= count)
        data = call.place(tokens, [row.position for row in placed])
        states = data["g"][0, :, 0]
        states[:, :count] = given.T
        # Padding repeats a row, as in `CallInputs`.
        states[:, count:] = states[:, count - 1 : count]
        for name in self._package.masks:
            rows.table.fill_mask(placed, data[name][0, 0])
        outputs = self._runtime.predict(call.function, {**data, "kv": rows.kv})
        rows.write(placed, outputs["kv_new"])
        names = [f"logits_{index}" for index in range(len(self._package.outputs))]
        left = [_bounded(outputs["state"][0, 0, :count])]
        left += [np.nan_to_num(outputs[name][0, 0, :count].astype(np.float32), nan=0.0) for name in names]
        return np.concatenate(left, axis=1)


def _form(package: Package) -> Eagle3Form:
    form = None if package.conditioning is None else package.conditioning.eagle3
    assert form is not None, "a package of EAGLE-3 states its form"
    return form


def _bounded(states: Single) -> Single:
    return np.clip(np.nan_to_num(states.astype(np.float32), nan=0.0), -_MOST, _MOST)


def _finite(rows: Single) -> Single:
    return np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)
