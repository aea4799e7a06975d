"""Any engine held to the pace of a device. Imports no MLX."""

from collections.abc import Callable, Iterable, Sequence

from draft_worker.engine import Batch, Engine, EngineSequence, JointEngine, ResumableSequence
from protocol.messages.sampling import Sampling
from protocol.messages.worker import KvReference
from protocol.speculation.candidates import Candidates
from protocol.worker.pacing import Pacer


def paced(engine: Engine, pacer: Pacer, clock: Callable[[], float]) -> "PacedEngine":
    """The engine at the pacer's pace."""
    return (
        JointPacedEngine(engine, pacer, clock) if isinstance(engine, JointEngine) else PacedEngine(engine, pacer, clock)
    )


class PacedEngine:
    """The inner engine, whose forwards take as long as the pacer says."""

    def __init__(self, inner: Engine, pacer: Pacer, clock: Callable[[], float]) -> None:
        self.name = inner.name
        self.model = inner.model
        self.architecture = inner.architecture
        self.vocabulary = inner.vocabulary
        self.context = inner.context
        self.device = inner.device
        self.tokenizer = inner.tokenizer
        self._inner = inner
        self._pacer = pacer
        self._clock = clock

    def open(self, sampling: Sampling, vocabulary: int) -> "PacedSequence":
        return _sequence(self._inner.open(sampling, vocabulary), self._pacer, self._clock)


class JointPacedEngine(PacedEngine):
    """The same for one whose forward can grow several trees."""

    def __init__(self, inner: JointEngine, pacer: Pacer, clock: Callable[[], float]) -> None:
        super().__init__(inner, pacer, clock)
        self._joint = inner

    def evaluate_together(self, asked: Sequence[tuple["PacedSequence", Batch]]) -> list[list[Candidates]]:
        began = self._clock()
        candidates = self._joint.evaluate_together([(sequence.inner, batch) for sequence, batch in asked])
        self._pacer.forward(began, sum(len(batch.committed) + len(batch.tokens) for _, batch in asked))
        return candidates


class PacedSequence:
    """The inner engine's sequence in everything but time."""

    def __init__(self, inner: EngineSequence, pacer: Pacer, clock: Callable[[], float]) -> None:
        self.path_tokens = inner.path_tokens
        self.inner = inner
        self._pacer = pacer
        self._clock = clock

    @property
    def committed(self) -> int:
        return self.inner.committed

    @property
    def next_row(self) -> int:
        return self.inner.next_row

    def prefill(self, tokens: Sequence[int]) -> None:
        began = self._clock()
        self.inner.prefill(tokens)
        self._pacer.prefill(began, len(tokens))

    def evaluate(self, batch: Batch) -> list[Candidates]:
        began = self._clock()
        candidates = self.inner.evaluate(batch)
        self._pacer.forward(began, len(batch.committed) + len(batch.tokens))
        return candidates

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        self.inner.keep(path, surviving)

    def truncate(self, length: int) -> None:
        self.inner.truncate(length)

    @property
    def memory(self) -> int:
        return self.inner.memory

    @property
    def copyable(self) -> bool:
        return self.inner.copyable

    def again(self, length: int, sampling: Sampling, vocabulary: int, *, free: bool) -> "PacedSequence":
        return _sequence(self.inner.again(length, sampling, vocabulary, free=free), self._pacer, self._clock)


class ResumablePacedSequence(PacedSequence):
    """The same for a sequence whose KV outlives the worker; none of that is a forward."""

    def __init__(self, inner: ResumableSequence, pacer: Pacer, clock: Callable[[], float]) -> None:
        super().__init__(inner, pacer, clock)
        self._resumable = inner

    @property
    def size(self) -> int:
        return self._resumable.size

    def adopt(self, reference: KvReference) -> str:
        return self._resumable.adopt(reference)

    def save(self) -> KvReference | None:
        return self._resumable.save()

    def close(self) -> None:
        self._resumable.close()


def _sequence(inner: EngineSequence, pacer: Pacer, clock: Callable[[], float]) -> PacedSequence:
    if isinstance(inner, ResumableSequence):
        return ResumablePacedSequence(inner, pacer, clock)
    return PacedSequence(inner, pacer, clock)
