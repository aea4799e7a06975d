"""The draft as a converted model: token trees through calls of fixed width. Knows no messages and no plans.

What runs the package is behind `Runtime`: Core ML on a Mac, our executor anywhere.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import mlx.core as mx

from draft_worker.candidates.selector import CandidateSelector
from draft_worker.coreml.converted import Converted
from draft_worker.coreml.runtime.arena_shelf import ArenaShelf, exchange_of
from draft_worker.coreml.runtime.forward import PackageForward
from draft_worker.coreml.runtime.interface import Runtime
from draft_worker.coreml.runtime.memory import DeviceMemory, HostMemory, KvMemory
from draft_worker.coreml.runtime.runtimes import open_runtime
from draft_worker.coreml.runtime.tree_slots import PREFIX
from draft_worker.engine import Batch, Engine, EngineSequence
from protocol.contracts.engines import EngineDeclaration
from protocol.contracts.examination import RuntimeName
from protocol.kv.arena_header import ArenaError
from protocol.kv.segments import SegmentError
from protocol.messages.sampling import Sampling
from protocol.messages.worker import KvReference, Start
from protocol.sampling.grammar import Grammars
from protocol.sampling.processors.logits_processors import LogitsProcessors
from protocol.speculation.candidates import Candidates
from protocol.worker.process import WorkerSetup

ENGINE = EngineDeclaration(
    help="a converted model on the Neural Engine, or by an executor where there is none", model="package"
)

OpenSelector: TypeAlias = Callable[[int], CandidateSelector]
"""What chooses for a target of a vocabulary."""


def load(setup: WorkerSetup) -> "CoreMlEngine":
    """Raises InputError if the folder is incomplete, damaged, or put together from several models."""
    return CoreMlEngine.load(Path(setup.model), epoch=setup.epoch, owner=setup.owner)


class CoreMlEngine(Engine):
    """A folder that `launch-pipeline convert` made."""

    name = "coreml"

    def __init__(self, converted: Converted, runtime: Runtime, epoch: int = 0, owner: int | None = None) -> None:
        """`owner`: the process whose end makes the caches' shared memory garbage; None to keep none there."""
        package = converted.package
        self.model = str(converted.folder)
        self.architecture = package.shape.architecture
        self.vocabulary = package.shape.vocabulary
        self.context = package.context
        self.device = runtime.device
        self.tokenizer = package.tokenizer
        self._package = package
        self._runtime = runtime
        self._forward = PackageForward(package, converted.tables, runtime)
        self._shelf = ArenaShelf(package, exchange_of(package, epoch, owner))
        self._choosers: dict[int, CandidateSelector] = {}
        """By the target's vocabulary."""
        self._grammars = Grammars(converted.folder, self.vocabulary)

    @classmethod
    def load(
        cls, folder: Path, runtime: RuntimeName | None = None, *, epoch: int = 0, owner: int | None = None
    ) -> "CoreMlEngine":
        """Raises InputError if the folder is incomplete, damaged, or put together from several models."""
        # The GPU is the target's; what the host computes beside a call is small.
        mx.set_default_device(mx.cpu)
        converted = Converted.open(folder)
        return cls(converted, open_runtime(converted, runtime), epoch, owner)

    def open(self, sampling: Sampling, vocabulary: int) -> "CoreMlSequence":
        if self._package.cache == "state":
            memory = DeviceMemory(self._package, self._runtime)
            return CoreMlSequence(self._forward, memory, sampling, vocabulary, self._chooser)
        return HostCachedSequence(self._forward, self._shelf, sampling, vocabulary, self._chooser)

    def processors(self, start: Start) -> LogitsProcessors | None:
        return LogitsProcessors.wanted(start, self._grammars, lenient=True)

    def _chooser(self, vocabulary: int) -> CandidateSelector:
        if vocabulary not in self._choosers:
            self._choosers[vocabulary] = CandidateSelector(vocabulary, min(self.vocabulary, vocabulary))
        return self._choosers[vocabulary]


class CoreMlSequence(EngineSequence):
    """One sequence's rows in a memory of whatever kind. A row without a slot has no candidates."""

    def __init__(
        self, forward: PackageForward, memory: KvMemory, sampling: Sampling, vocabulary: int, choosers: OpenSelector
    ) -> None:
        self._choosers = choosers
        self._forward = forward
        self._memory = memory
        self._serve(sampling, vocabulary)

    @property
    def committed(self) -> int:
        return self._memory.slots.committed

    @property
    def next_row(self) -> int:
        return self._memory.slots.next_row

    def prefill(self, tokens: Sequence[int]) -> None:
        path = range(self.next_row, self.next_row + len(tokens))
        for numbers in self._placed(tokens, _chain(path)):
            self._forward.run(self._memory, numbers)
        self.keep(path, ())

    def evaluate(self, batch: Batch) -> list[Candidates]:
        begin = self.next_row
        path = range(begin, begin + len(batch.committed))
        tip = path[-1] if path else PREFIX
        parents = [*_chain(path), *(tip if parent == PREFIX else parent for parent in batch.parents)]
        nodes = range(path.stop, begin + len(parents))
        found = {node: Candidates([], []) for node in nodes}
        for numbers in self._placed([*batch.committed, *batch.tokens], parents):
            asked = [number for number in numbers if number in found]
            found.update(zip(asked, self._asked(batch, numbers, asked, nodes.start), strict=True))
        if path:
            self.keep(path, nodes)
        return list(found.values())

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        kept = self._memory.slots.keep(path, surviving)
        self._memory.exchange(kept.exchanged)
        if kept.unwritten:
            self.prefill(kept.unwritten)

    def truncate(self, length: int) -> None:
        self._memory.slots.truncate(length)

    @property
    def memory(self) -> int:
        return self._memory.size

    def reopen(self, length: int, sampling: Sampling, vocabulary: int, *, exclusive: bool) -> "CoreMlSequence":
        super().reopen(length, sampling, vocabulary, exclusive=exclusive)
        self._serve(sampling, vocabulary)
        return self

    def _serve(self, sampling: Sampling, vocabulary: int) -> None:
        """The next forwards are for such a request."""
        self._sampling = sampling
        self._chooser = self._choosers(vocabulary)

    def _placed(self, tokens: Sequence[int], parents: Sequence[int]) -> Iterator[list[int]]:
        """New rows that have slots, as many at a time as a call takes: make it before asking for more."""
        slots, begin = self._memory.slots, 0
        while begin < len(tokens):
            self._memory.make_room(self._forward.width(len(tokens) - begin))
            end = min(len(tokens), begin + self._forward.most(self._memory.room))
            numbers = slots.add(tokens[begin:end], parents[begin:end], self._forward.width(end - begin))
            written = [number for number in numbers if slots.row(number).slot is not None]
            if written:
                yield written
            begin = end

    def _asked(self, batch: Batch, numbers: Sequence[int], asked: Sequence[int], first: int) -> list[Candidates]:
        """Make the call for rows `numbers`; candidates of its last ones, `asked`. `first` is the batch's first node."""
        part = batch._replace(
            fans=[batch.fans[number - first] for number in asked] if batch.fans else (),
            paths=[batch.paths[number - first] for number in asked] if batch.paths else (),
        )
        positions = [self._memory.slots.row(number).position + 1 for number in asked]
        self._chooser.begin(self._sampling, positions, batch)
        logits = self._forward.run(self._memory, numbers)
        return self._chooser.choose(logits[len(numbers) - len(asked) :], positions, self._sampling, part)


class HostCachedSequence(CoreMlSequence):
    """The same with its cache on the shelf, where another worker's life finds it."""

    copyable = True

    def __init__(
        self, forward: PackageForward, shelf: ArenaShelf, sampling: Sampling, vocabulary: int, choosers: OpenSelector
    ) -> None:
        self._shelf = shelf
        self._held = shelf.take()
        super().__init__(forward, HostMemory(self._held.array), sampling, vocabulary, choosers)

    @property
    def size(self) -> int:
        return self._held.size

    def adopt(self, reference: KvReference) -> str:
        try:
            held = self._shelf.adopt(reference)
        except (ArenaError, SegmentError) as error:
            return str(error)
        self._shelf.give_back(self._held)
        self._held = held
        self._memory = HostMemory(held.array)
        self._memory.slots.adopt(reference.tokens)
        return ""

    def save(self) -> KvReference | None:
        return self._held.save(self.committed)

    def truncate(self, length: int) -> None:
        self._held.cut(length)
        super().truncate(length)

    def reopen(self, length: int, sampling: Sampling, vocabulary: int, *, exclusive: bool) -> CoreMlSequence:
        if exclusive:
            return super().reopen(length, sampling, vocabulary, exclusive=True)
        other = HostCachedSequence(self._forward, self._shelf, sampling, vocabulary, self._choosers)
        # Committed tokens lie in the first slots, in order.
        other._held.array[:, :, :length] = self._held.array[:, :, :length]
        other._memory.slots.adopt(length)
        return other

    def close(self) -> None:
        self._shelf.give_back(self._held)


def _chain(numbers: range) -> list[int]:
    """Parents of rows that follow one another, the first one the committed tokens."""
    return [PREFIX, *numbers[:-1]] if numbers else []
