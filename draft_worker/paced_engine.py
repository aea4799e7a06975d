"""Any engine, paced by a device profile. Imports no MLX."""

from collections.abc import Callable, Sequence

from draft_worker.engine import Batch, Engine
from draft_worker.wrapped_engine import WrappedEngine, WrappedSequence
from protocol.speculation.candidates import Candidates
from protocol.worker.pacing import Pacer


class PacedEngine(WrappedEngine):
    """The inner engine, whose forwards take the times that the pacer gives."""

    def __init__(self, inner: Engine, pacer: Pacer, clock: Callable[[], float]) -> None:
        super().__init__(inner)
        self._pacer = pacer
        self._clock = clock

    def prefill(self, sequence: WrappedSequence, tokens: Sequence[int]) -> None:
        began = self._clock()
        super().prefill(sequence, tokens)
        self._pacer.prefill(began, len(tokens))

    def evaluate_together(self, parts: Sequence[tuple[WrappedSequence, Batch]]) -> list[list[Candidates]]:
        began = self._clock()
        candidates = super().evaluate_together(parts)
        self._pacer.forward(began, sum(len(batch.committed) + len(batch.tokens) for _, batch in parts))
        return candidates
