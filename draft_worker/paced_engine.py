"""Any engine, paced by a device profile. Imports no MLX."""

from collections.abc import Callable, Sequence

from draft_worker.engine import Batch, Engine
from draft_worker.wrapped_engine import WrappedEngine, WrappedSequence
from protocol.speculation.candidates import Candidates
from protocol.worker.pacing import ForwardPart, Pacer


class PacedEngine(WrappedEngine):
    """The inner engine, whose forwards take the times that the pacer gives."""

    def __init__(self, inner: Engine, pacer: Pacer, clock: Callable[[], float]) -> None:
        super().__init__(inner)
        self._pacer = pacer
        self._clock = clock

    def prefill(self, sequence: WrappedSequence, tokens: Sequence[int]) -> None:
        began, context = self._clock(), sequence.committed
        super().prefill(sequence, tokens)
        self._pacer.prefill(began, len(tokens), context)

    def evaluate_together(self, parts: Sequence[tuple[WrappedSequence, Batch]]) -> list[list[Candidates]]:
        began = self._clock()
        work = [ForwardPart(len(batch.committed) + len(batch.tokens), sequence.committed) for sequence, batch in parts]
        candidates = super().evaluate_together(parts)
        self._pacer.forward(began, work)
        return candidates
