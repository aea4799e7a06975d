"""An engine that delegates to an inner engine; subclasses override what differs, as a pace does. Imports no MLX."""

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from draft_worker.engine import Batch, Engine, EngineSequence
from protocol.messages.kv import KvReference
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.speculation.candidates import Candidates
from protocol.worker.pacing import PacedPart, Pacer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from protocol.sampling.processors.logits_processors import LogitsProcessors


class WrappedEngine(Engine):
    """Every forward of a sequence runs through `prefill`, `read` or `evaluate_together`."""

    def __init__(self, inner: Engine) -> None:
        self.name = inner.name
        self.model = inner.model
        self.architecture = inner.architecture
        self.vocabulary = inner.vocabulary
        self.context = inner.context
        self.device = inner.device
        self.tokenizer = inner.tokenizer
        self.joint = inner.joint
        self.features = inner.features
        self.kv = inner.kv
        self.model_fingerprint = inner.model_fingerprint
        self.costs = inner.costs
        self._inner = inner

    def open(self, sampling: Sampling, vocabulary: int) -> "WrappedSequence":
        return WrappedSequence(self, self._inner.open(sampling, vocabulary), vocabulary)

    def prefill(self, sequence: "WrappedSequence", tokens: Sequence[int]) -> None:
        """`EngineSequence.prefill` of a sequence that this engine has opened."""
        sequence.inner.prefill(tokens)

    def read(self, sequence: "WrappedSequence", most: int) -> int:
        """`EngineSequence.read` of a sequence that this engine has opened."""
        return sequence.inner.read(most)

    def processors(self, start: Start) -> "LogitsProcessors | None":
        return self._inner.processors(start)

    def joins(self, parts: Sequence[tuple["WrappedSequence", int]]) -> bool:
        return self._inner.joins([(sequence.inner, rows) for sequence, rows in parts])

    def evaluate_together(self, parts: Sequence[tuple["WrappedSequence", Batch]]) -> list[list[Candidates]]:
        return self._inner.evaluate_together([(sequence.inner, batch) for sequence, batch in parts])


class WrappedSequence(EngineSequence):
    """A sequence of the inner engine, whose forwards run through the wrapper."""

    def __init__(self, engine: WrappedEngine, inner: EngineSequence, vocabulary: int) -> None:
        """`vocabulary`: tokens that the target knows."""
        self.copyable = inner.copyable
        self.step_nodes = inner.step_nodes
        self.inner = inner
        self.vocabulary = vocabulary
        self._engine = engine

    @property
    def committed(self) -> int:
        return self.inner.committed

    @property
    def next_row(self) -> int:
        return self.inner.next_row

    def prefill(self, tokens: Sequence[int]) -> None:
        self._engine.prefill(self, tokens)

    def evaluate(self, batch: Batch) -> list[Candidates]:
        return self._engine.evaluate_together([(self, batch)])[0]

    @property
    def forward_widths(self) -> Sequence[int] | None:
        return self.inner.forward_widths

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        self.inner.keep(path, surviving)

    def feed(self, first: int, rows: "NDArray[np.float32]") -> None:
        self.inner.feed(first, rows)

    @property
    def unread(self) -> bool:
        return self.inner.unread

    def read(self, most: int) -> int:
        return self._engine.read(self, most)

    @property
    def staleness(self) -> int:
        return self.inner.staleness

    def reach(self, tokens: int) -> int:
        return self.inner.reach(tokens)

    def truncate(self, length: int) -> None:
        self.inner.truncate(length)

    @property
    def memory(self) -> int:
        return self.inner.memory

    def reopen(self, length: int, sampling: Sampling, vocabulary: int, *, exclusive: bool) -> "WrappedSequence":
        inner = self.inner.reopen(length, sampling, vocabulary, exclusive=exclusive)
        return WrappedSequence(self._engine, inner, vocabulary)

    @property
    def size(self) -> int:
        return self.inner.size

    def adopt(self, reference: KvReference) -> str:
        return self.inner.adopt(reference)

    def save(self) -> KvReference | None:
        return self.inner.save()

    def close(self) -> None:
        self.inner.close()


class PacedEngine(WrappedEngine):
    """The inner engine, whose forwards take the times that the pacer gives."""

    def __init__(self, inner: Engine, pacer: Pacer, clock: Callable[[], float]) -> None:
        super().__init__(inner)
        self._pacer = pacer
        self._clock = clock

    def prefill(self, sequence: WrappedSequence, tokens: Sequence[int]) -> None:
        began, context = self._clock(), sequence.committed
        super().prefill(sequence, tokens)
        if self.features is None:
            self._pacer.prefill(began, len(tokens), context)

    def read(self, sequence: WrappedSequence, most: int) -> int:
        began = self._clock()
        tokens = super().read(sequence, most)
        if tokens:
            self._pacer.prefill(began, tokens, max(0, sequence.committed - sequence.staleness - tokens))
        return tokens

    def evaluate_together(self, parts: Sequence[tuple[WrappedSequence, Batch]]) -> list[list[Candidates]]:
        began = self._clock()
        contexts = [sequence.committed for sequence, _ in parts]
        candidates = super().evaluate_together(parts)
        for widths in zip_longest(*(_forwards(*part) for part in parts), fillvalue=0):
            work = [PacedPart(*each) for each in zip(widths, contexts, strict=True) if each[0]]
            self._pacer.forward(began, work)
            began = self._clock()
        return candidates


def _forwards(sequence: WrappedSequence, batch: Batch) -> Sequence[int]:
    """Tokens of each forward that has evaluated `batch`."""
    stated = sequence.forward_widths
    return [len(batch.committed) + len(batch.tokens)] if stated is None else stated
