"""Any engine, paced by a device profile. Imports no MLX."""

from collections.abc import Callable, Sequence
from itertools import zip_longest

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
            work = [ForwardPart(*each) for each in zip(widths, contexts, strict=True) if each[0]]
            self._pacer.forward(began, work)
            began = self._clock()
        return candidates


def _forwards(sequence: WrappedSequence, batch: Batch) -> Sequence[int]:
    """Tokens of each forward that has evaluated `batch`."""
    stated = sequence.forward_widths
    return [len(batch.committed) + len(batch.tokens)] if stated is None else stated
