"""The engine of every drafter whose rows read features: sequences, joint forwards, candidates. Knows no checkpoint.

What the engines `eagle3` and `mtp` share.
"""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import mlx.core as mx
import numpy as np

from draft_worker.candidates.columns import Columns
from draft_worker.candidates.context_columns import ContextColumns, widened
from draft_worker.columns_engine import ColumnsEngine
from draft_worker.conditioned.runner import ConditionedRunner, Wave
from draft_worker.conditioned.sequence import ConditionedRows, Outputs
from draft_worker.engine import Batch, EngineSequence
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint
from protocol.inference.device import BESIDE_TARGET, wire
from protocol.kv.arena_header import ArenaError
from protocol.kv.segments import SegmentError
from protocol.messages.kv import KvReference
from protocol.messages.sampling import Sampling
from protocol.speculation.candidates import Candidates
from protocol.worker.process import WorkerSetup

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Result = TypeVar("_Result")


class ConditionedEngine(ColumnsEngine):
    """A drafter, wherever it runs."""

    def __init__(self, name: str, folder: Path, runner: ConditionedRunner, tokenizer: str, tokens: Path) -> None:
        """`tokenizer`: the fingerprint of the tokenizer, which lies in the folder `tokens`."""
        self.name = name
        self.model = str(folder)
        self.architecture = runner.architecture
        self.set_up_columns(tokens, runner.vocabulary, runner.head_tokens)
        self.context = runner.context
        self.device = runner.device
        self.tokenizer = tokenizer
        self.features, self.matrix = runner.features, runner.matrix
        self.joint = runner.joint
        self._runner = runner

    @classmethod
    def load(cls, setup: WorkerSetup, load_runner: Callable[[Path, Path | None], ConditionedRunner]) -> Self:
        """`load_runner`: from the folders of the drafter and of its target, if that is another one. Costs are measured
        where that is worth its time. Raises InputError as it does."""
        began = time.perf_counter()
        folder, target = Path(setup.model), Path(setup.target) if setup.target else None
        runner, tokens = load_runner(folder, target), target or folder
        engine = cls(setup.engine, folder, runner, vocabulary_fingerprint(tokens), tokens)
        wire(setup.gpu_share, BESIDE_TARGET)
        if setup.pace is None:
            engine.costs = runner.costs(time.perf_counter() - began)
        return engine

    def open(self, sampling: Sampling, vocabulary: int) -> "ConditionedSequence":
        return self.around(self.rows(), sampling, vocabulary)

    def rows(self) -> ConditionedRows:
        """Of a new, empty sequence."""
        return ConditionedRows(self._runner.open())

    def copied(self, rows: ConditionedRows, length: int) -> ConditionedRows:
        return rows.copy(length, self._runner.open())

    def around(self, rows: ConditionedRows, sampling: Sampling, vocabulary: int) -> "ConditionedSequence":
        """A sequence that has the KV of `rows`."""
        return ConditionedSequence(self, rows, sampling, self.columns(vocabulary))

    @property
    def widens(self) -> bool:
        """Whether tokens of a context that the head lacks can be guessed."""
        return self._runner.short_head is not None and self._runner.short_head.widens

    def joins(self, parts: Sequence[tuple["ConditionedSequence", int]]) -> bool:
        widest = self._runner.widest
        return self.joint and (widest is None or sum(rows for _, rows in parts) <= widest)

    def evaluate_together(self, parts: Sequence[tuple["ConditionedSequence", Batch]]) -> list[list[Candidates]]:
        sequences = [sequence for sequence, _ in parts]
        for sequence, batch in parts:
            sequence.columns.see([*batch.committed, *batch.tokens])
        runs = [sequence.rows.forwards(batch) for sequence, batch in parts]
        if self.joint:
            outputs = self.run(sequences, runs)
        else:
            outputs = [self.run([each], [run])[0] for each, run in zip(sequences, runs, strict=True)]
        blank = mx.zeros((self._runner.width,))
        stacked = mx.stack([blank if row is None else row for rows in outputs for row in rows])
        more = widened(self._runner.short_head, [sequence.columns for sequence in sequences])
        logits = self._runner.logits(stacked)
        found, first = [], 0
        for rows, (sequence, batch) in zip(outputs, parts, strict=True):
            own = sequence.columns.own(logits[first : first + len(rows)], more)
            found.append(sequence.candidates(own, rows, batch))
            first += len(rows)
        return found

    def run(
        self, sequences: Sequence["ConditionedSequence"], runs: Sequence[Generator[Wave, mx.array, _Result]]
    ) -> list[_Result]:
        """Run the forwards of different sequences, the first ones together, then the second ones, and so on."""
        results: dict[int, Any] = {}
        for sequence in sequences:
            sequence.ran = []
        waves: dict[int, Wave] = {}
        sent: dict[int, mx.array | None] = dict.fromkeys(range(len(runs)))
        while sent:
            waves.clear()
            for number, outputs in sent.items():
                try:
                    waves[number] = runs[number].send(outputs) if outputs is not None else next(runs[number])
                except StopIteration as stop:
                    results[number] = stop.value
            for number, wave in waves.items():
                sequences[number].ran.append(len(wave.inputs))
            sent = dict(zip(waves, self._runner.forward(list(waves.values())) if waves else (), strict=True))
        return [results[number] for number in range(len(runs))]


class ConditionedSequence(EngineSequence):
    """The rows of one sequence, and the sampling of its request."""

    copyable = True

    def __init__(self, engine: ConditionedEngine, rows: ConditionedRows, sampling: Sampling, columns: Columns) -> None:
        self.rows = rows
        self.ran: list[int] = []
        """Tokens of each forward since the last `evaluate` or `read` began."""
        self._engine = engine
        self._sampling = sampling
        self.columns = ContextColumns(columns, widens=engine.widens)

    @property
    def committed(self) -> int:
        return len(self.rows.committed.tokens)

    @property
    def next_row(self) -> int:
        return self.rows.next_row

    @property
    def forward_widths(self) -> Sequence[int]:
        return self.ran

    def prefill(self, tokens: Sequence[int]) -> None:
        """Commits the tokens; their rows are computed when features are there."""
        self.columns.see(tokens)
        self.rows.append(tokens)

    def evaluate(self, batch: Batch) -> list[Candidates]:
        return self._engine.evaluate_together([(self, batch)])[0]

    def candidates(self, logits: mx.array, outputs: Outputs, batch: Batch) -> list[Candidates]:
        """From the (L, head) `logits` of a batch's nodes; none behind a node without an output."""
        positions = [depth + 1 + batch.skipped for depth in self.rows.depths(batch)]
        found = self.columns.now.propose(logits, positions, self._sampling, batch)
        nothing = Candidates([], [])
        return [nothing if row is None else each for each, row in zip(found, outputs, strict=True)]

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        self.rows.keep(path, surviving)

    def truncate(self, length: int) -> None:
        self.rows.truncate(length)

    def feed(self, first: int, rows: "NDArray[np.float32]") -> None:
        form = self._engine.features
        assert form is not None
        if rows.ndim == 2 and rows.shape[1] in (form.joined, form.elements):
            self.rows.committed.feed(first, rows)

    @property
    def unread(self) -> bool:
        return self.rows.committed.waiting > MOST_TOGETHER

    def read(self, most: int) -> int:
        self._engine.run([self], [self.rows.reading(most)])
        self.rows.compute()
        return sum(self.ran)

    @property
    def staleness(self) -> int:
        return self.committed - 1 - self.rows.committed.newest

    @property
    def memory(self) -> int:
        return self.rows.memory

    @property
    def size(self) -> int:
        return self.rows.size

    def save(self) -> KvReference | None:
        return self.rows.save()

    def adopt(self, reference: KvReference, tokens: Sequence[int]) -> str:
        try:
            adopted = self.rows.adopt(reference, tokens)
        except (ArenaError, SegmentError) as error:
            return str(error)
        self.columns.see(tokens)
        return "" if adopted else super().adopt(reference, tokens)

    def close(self) -> None:
        self.rows.close()

    def reopen(self, length: int, sampling: Sampling, vocabulary: int, *, exclusive: bool) -> "ConditionedSequence":
        rows = self.rows if exclusive else self._engine.copied(self.rows, length)
        rows.truncate(length)
        opened = self._engine.around(rows, sampling, vocabulary)
        opened.columns.see(self.columns.tokens)
        return opened


MOST_TOGETHER = 16
"""So many committed tokens whose features were fed join the next forward. More of them have forwards of their own."""
