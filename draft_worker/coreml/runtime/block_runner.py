"""A block drafter as a converted package: the context's keys and values on the host, blocks in calls of fixed width.

Knows no trees and no sampling.
"""

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from draft_worker.candidates.block_candidates import SelectorTables
from draft_worker.candidates.host_ranking import best_tokens
from draft_worker.coreml.arrays import Single
from draft_worker.coreml.conditioning import SELECTOR
from draft_worker.coreml.converted import Converted, HostTables
from draft_worker.coreml.package import Package
from draft_worker.coreml.runtime.calls import FeatureReader, PackageCalls, Runtime
from draft_worker.coreml.runtime.memory import CachePool, HostMemory
from draft_worker.coreml.runtime.tree_slots import HIDDEN
from draft_worker.drafters.block import MarkovHead, markov_head
from draft_worker.drafters.block_forward import (
    Asked,
    Block,
    BlockContext,
    BlockInputs,
    BlockRows,
    Choices,
    FedRows,
)
from draft_worker.projection import ProjectionMatrix
from protocol.contracts.drafters.description import BlockForm
from protocol.kv.exchange import KvExchange


class PackageContext(HostMemory):
    """A `ContextStore`: committed tokens, in the order in which they were added."""

    def __init__(self, pool: CachePool, reader: FeatureReader) -> None:
        super().__init__(pool)
        self._reader = reader

    def add(self, fed: FedRows, tokens: Sequence[int]) -> None:
        for count, outputs in self._reader.read(fed.rows, range(fed.first, fed.end)):
            first = self.slots.committed
            self.slots.replace(first, count)
            self.write(range(first, first + count), outputs["kv_new"][:, :, :count])

    def compute(self) -> None:
        """It is computed already."""

    def keep(self, count: int) -> None:
        self.truncate(min(self.slots.committed, count))

    def copy(self, count: int) -> "PackageContext":
        other = PackageContext(self._pool, self._reader)
        other.begin_with(self, count)
        return other


class PackageBlockRunner:
    """A `BlockRunner`. As many blocks of a sequence as fit into the widest function share a call."""

    joint: bool = False
    matrix: ProjectionMatrix | None = None

    def __init__(self, converted: Converted, runtime: Runtime, exchange: KvExchange | None = None) -> None:
        """`exchange`: of the contexts' shared memory; None for contexts without shared memory."""
        package, tables = converted.package, converted.tables
        self.form = _form(package)
        self.architecture: str = self.form.kind
        self.context = package.context
        self.device = runtime.device
        self.head_tokens = tables.head_tokens
        self.markov_head = _markov_head(self.form, tables)
        self.selector = _selector(self.form, tables)
        self._calls = PackageCalls(package, tables, runtime)
        self._reader = FeatureReader(package, tables, runtime)
        self._pool = CachePool(package, exchange)

    def open(self) -> BlockContext:
        return BlockContext(PackageContext(self._pool, self._reader))

    def forward(self, asked: Sequence[Asked]) -> list[list[BlockRows]]:
        found = []
        for context, blocks in asked:
            context.read_all()
            found.append([rows for part in self._parts(blocks) for rows in self._call(context, part)])
        return found

    def _parts(self, blocks: Sequence[Block]) -> Iterator[list[Block]]:
        """The blocks of each call, in order."""
        part: list[Block] = []
        free = widest = self._calls.widest
        for block in blocks:
            needed = len(block.tokens) + self.form.masks
            if part and needed > free:
                yield part
                part, free = [], widest
            part.append(block)
            free -= needed
        yield part

    def _call(self, context: BlockContext, blocks: Sequence[Block]) -> list[BlockRows]:
        store = context.store
        assert isinstance(store, PackageContext)
        inputs = BlockInputs.of(self.form, blocks)
        function, data = self._calls.place(inputs.tokens, inputs.positions)
        for name, window in self._calls.masks.items():
            _fill_mask(data[name][0, 0], self.context, context.positions, inputs, window)
            if self.form.is_causal(window):
                _hide_later(data[name][0, 0], self.context, inputs)
        if "ancestors" in data:
            _fill_ancestors(data["ancestors"][0], inputs)
        outputs = self._calls.predict(function, {**data, "kv": store.kv})
        logits, head = self._calls.logits(outputs, inputs.rows), self._calls.head_rows
        if not np.isfinite(logits[:, :head]).all():
            logits[:, :head] = np.nan_to_num(logits[:, :head], nan=0.0)
        states = outputs["state"][0, 0, inputs.rows] if "state" in outputs else np.zeros((len(logits), 0))
        states = states.astype(np.float32)
        parts = [slice(first, first + self.form.rows) for first in range(0, len(inputs.rows), self.form.rows)]
        return [self._block_rows(logits[part], states[part]) for part in parts]

    def _block_rows(self, logits: Single, states: Single) -> BlockRows:
        whole = mx.array(logits[:, : self._calls.head_rows])
        if self.selector is None:
            return BlockRows(whole, mx.array(states))
        columns, best = zip(*(best_tokens(row, self.form.choices) for row in logits), strict=True)
        latents = np.nan_to_num(states, nan=0.0)
        return BlockRows(whole, mx.zeros((len(states), 0)), Choices(np.stack(columns), np.stack(best), latents))


def _fill_mask(mask: Single, context: int, known: Sequence[int], inputs: BlockInputs, window: int | None) -> None:
    """Fill (width, context + width): an input sees the `known` positions of the context, those within its window, and
    all of its own block. Padding sees itself."""
    mask[:] = HIDDEN
    count, width = len(inputs.tokens), len(mask)
    own = np.asarray(inputs.numbers)
    mask[:count, context : context + count][own[:, None] == own[None]] = 0
    padding = np.arange(count, width)
    mask[padding, context + padding] = 0
    seen = mask[:count, : len(known)]
    if window is None:
        seen[:] = 0
    else:
        seen[np.asarray(inputs.positions)[:, None] - np.asarray(known, np.int64)[None] < window] = 0


def _hide_later(mask: Single, context: int, inputs: BlockInputs) -> None:
    """Let an input see nothing behind itself."""
    count, at = len(inputs.tokens), np.asarray(inputs.positions)
    mask[:count, context : context + count][at[:, None] < at[None]] = HIDDEN


def _fill_ancestors(ancestors: Single, inputs: BlockInputs) -> None:
    """Fill (taps - 1, width, width): 1 where a row is the input so many places before the column's, in its block."""
    ancestors[:] = 0
    own = np.asarray(inputs.numbers)
    for back, chosen in enumerate(ancestors, start=1):
        rows = np.flatnonzero(own[back:] == own[:-back])
        chosen[rows, rows + back] = 1


def _form(package: Package) -> BlockForm:
    form = None if package.conditioning is None else package.conditioning.block
    assert form is not None, "a package of a block drafter states its form"
    return form


def _markov_head(form: BlockForm, tables: HostTables) -> MarkovHead | None:
    if form.markov is None:
        return None
    head = markov_head(form, None if tables.head_tokens is None else len(tables.head_tokens))
    prefix = "markov_head."
    arrays = tables.parameters.items()
    head.load_weights([(name.removeprefix(prefix), mx.array(array).astype(mx.float32)) for name, array in arrays])
    return head


def _selector(form: BlockForm, tables: HostTables) -> SelectorTables | None:
    """Its projection is the package's."""
    codebooks = [f"{SELECTOR}.{name}_codebook" for name in ("predecessor", "successor")]
    return SelectorTables(*(tables.parameters[name] for name in codebooks)) if form.choices else None
