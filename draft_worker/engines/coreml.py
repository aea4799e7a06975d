"""The draft as a converted model: token trees through calls of fixed width. Knows no messages and no growth plans.

A `Runtime` runs the package: Core ML on a Mac, the executor anywhere.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from draft_worker.candidates.head_columns import ColumnsEngine
from draft_worker.candidates.host_ranking import CandidateSelector
from draft_worker.coreml.converted import Converted
from draft_worker.coreml.package import Single
from draft_worker.coreml.runtime.calls import PackageForward, Runtime, chain
from draft_worker.coreml.runtime.joint_memory import part_rows
from draft_worker.coreml.runtime.memory import CachePool, CallPart, HostMemory
from draft_worker.coreml.runtime.runtimes import open_runtime
from draft_worker.engine_interface import Batch, Engine, EngineSequence
from protocol.contracts.engines import EngineDeclaration
from protocol.inference.device import compute_on_processor
from protocol.inference.slots import PREFIX
from protocol.messages.sampling import Sampling
from protocol.speculation.token_tree import Candidates
from protocol.worker.process import WorkerSetup


class Evaluation:
    """The rows of one batch, and the candidates found so far. A call evaluates some of the rows, or all."""

    def __init__(
        self, sequence: "CoreMlSequence", selector: CandidateSelector, sampling: Sampling, batch: Batch
    ) -> None:
        first = sequence.next_row
        self._path = range(first, first + len(batch.committed))
        tip = self._path[-1] if self._path else PREFIX
        self.tokens = [*batch.committed, *batch.tokens]
        self.parents = [*chain(self._path), *(tip if parent == PREFIX else parent for parent in batch.parents)]
        self._nodes = range(self._path.stop, first + len(self.parents))
        self._found = {node: Candidates([], []) for node in self._nodes}
        self._sequence = sequence
        self._selector = selector
        self._sampling = sampling
        self._batch = batch

    def begin(self, numbers: Sequence[int]) -> None:
        """A call of these rows comes: start to draw the noise that their candidates need."""
        self._selector.begin(self._sampling, self._positions(self._wanted(numbers)))

    def end(self, numbers: Sequence[int], logits: Single) -> None:
        """Find candidates in the logits of these rows, which may be overwritten. There may be no node among them."""
        wanted, batch, first = self._wanted(numbers), self._batch, self._nodes.start
        if not wanted:
            return
        part = batch._replace(paths=[batch.paths[number - first] for number in wanted] if batch.paths else ())
        behind = logits[len(numbers) - len(wanted) :]
        found = self._selector.select(behind, self._positions(wanted), self._sampling, part)
        self._found.update(zip(wanted, found, strict=True))

    def candidates(self) -> list[Candidates]:
        """Those of all nodes. Commits the batch's committed tokens."""
        if self._path:
            self._sequence.keep(self._path, self._nodes)
        return list(self._found.values())

    def _wanted(self, numbers: Sequence[int]) -> list[int]:
        """The nodes among these rows, which are the last ones."""
        return [number for number in numbers if number in self._found]

    def _positions(self, rows: Sequence[int]) -> list[int]:
        """Of the tokens behind these rows, in the conversation."""
        return [self._sequence.position(row) + 1 + self._batch.skipped for row in rows]


ENGINE = EngineDeclaration(
    help="a converted model on the Neural Engine, or by an executor where there is none", model="package"
)

OpenSelector: TypeAlias = Callable[[int], CandidateSelector]
"""The selector for a target's vocabulary, given its size."""


def load(setup: WorkerSetup) -> Engine:
    """Raises InputError if the folder is incomplete, damaged, or mixed from several models."""
    # The GPU is the target's; the host computes little beside a call.
    compute_on_processor()
    converted = Converted.open(Path(setup.model))
    return CoreMlEngine(converted, open_runtime(converted))


class CoreMlEngine(ColumnsEngine):
    """A folder that `launch-pipeline convert` made."""

    name = "coreml"
    joint = True

    def __init__(self, converted: Converted, runtime: Runtime) -> None:
        package = converted.package
        self.model = str(converted.folder)
        self.architecture = package.shape.architecture
        self.set_up_columns(converted.folder, package.shape.vocabulary, converted.tables.head_tokens)
        self.context = package.context
        self.device = runtime.device
        self.tokenizer = converted.vocabulary_fingerprint()
        self._forward = PackageForward(package, converted.tables, runtime)
        self._pool = CachePool(package)
        self._selectors: dict[int, CandidateSelector] = {}
        """By the size of the target's vocabulary."""

    def open(self, sampling: Sampling, vocabulary: int) -> "CoreMlSequence":
        return CoreMlSequence(self._forward, self._pool, sampling, vocabulary, self._selector)

    def joins(self, parts: Sequence[tuple["CoreMlSequence", int]]) -> bool:
        return self._forward.joins([(sequence.host, rows) for sequence, rows in parts])

    def evaluate_together(self, parts: Sequence[tuple["CoreMlSequence", Batch]]) -> list[list[Candidates]]:
        together = [(sequence, len(batch.committed) + len(batch.tokens)) for sequence, batch in parts]
        if len(parts) < 2 or not self.joins(together):
            return super().evaluate_together(parts)
        evaluations = [sequence.evaluation(batch) for sequence, batch in parts]
        placed: list[CallPart] = []
        for (sequence, _), each in zip(parts, evaluations, strict=True):
            # A step that joins fits into one call.
            (part,) = self._forward.placed(sequence.host, each.tokens, each.parents)
            each.begin(part.numbers)
            placed.append(part)
        logits = self._forward.evaluate(placed)
        for each, part, rows in zip(evaluations, placed, part_rows(placed), strict=True):
            each.end(part.numbers, logits[rows])
        return [each.candidates() for each in evaluations]

    def _selector(self, vocabulary: int) -> CandidateSelector:
        if vocabulary not in self._selectors:
            self._selectors[vocabulary] = CandidateSelector(self.columns(vocabulary))
        return self._selectors[vocabulary]


class CoreMlSequence(EngineSequence):
    """The rows of one sequence, whose cache is a pool's. A row without a slot has no candidates."""

    copyable = True

    def __init__(
        self, forward: PackageForward, pool: CachePool, sampling: Sampling, vocabulary: int, selectors: OpenSelector
    ) -> None:
        self._selectors = selectors
        self._forward = forward
        self._pool = pool
        self.host = HostMemory(pool)
        self._serve(sampling, vocabulary)

    @property
    def committed(self) -> int:
        return self.host.slots.committed

    @property
    def next_row(self) -> int:
        return self.host.next_row

    def prefill(self, tokens: Sequence[int]) -> None:
        self._forward.prefill(self.host, tokens)

    def evaluate(self, batch: Batch) -> list[Candidates]:
        evaluation = self.evaluation(batch)
        for part in self._forward.placed(self.host, evaluation.tokens, evaluation.parents):
            evaluation.begin(part.numbers)
            evaluation.end(part.numbers, self._forward.evaluate([part]))
        return evaluation.candidates()

    def evaluation(self, batch: Batch) -> Evaluation:
        """The evaluation of `batch`, whose calls the caller makes."""
        return Evaluation(self, self._selector, self._sampling, batch)

    def position(self, row: int) -> int:
        return self.host.position(row)

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        self._forward.keep(self.host, path, surviving)

    def truncate(self, length: int) -> None:
        self.host.truncate(length)

    @property
    def memory(self) -> int:
        return self.host.memory

    def reopen(self, length: int, sampling: Sampling, vocabulary: int, *, exclusive: bool) -> "CoreMlSequence":
        if exclusive:
            self.truncate(length)
            self._serve(sampling, vocabulary)
            return self
        other = CoreMlSequence(self._forward, self._pool, sampling, vocabulary, self._selectors)
        other.host.begin_with(self.host, length)
        return other

    def close(self) -> None:
        self.host.close()

    def _serve(self, sampling: Sampling, vocabulary: int) -> None:
        """Set the request that the next forwards are for."""
        self._sampling = sampling
        self._selector = self._selectors(vocabulary)
