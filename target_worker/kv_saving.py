"""The sequences whose KV is to be saved to shared memory, a slice at a time, in turns."""

import logging
from collections.abc import Callable, Iterator

from protocol.kv.segments import SegmentError
from protocol.messages.base import SequenceId
from protocol.messages.kv import KvOffer
from target_worker.engine import TargetSequence

log = logging.getLogger(__name__)


class KvSaving:
    """Offers what it has saved."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[SequenceId, TargetSequence] = {}

    @property
    def next(self) -> SequenceId | None:
        """The sequence of the next slice; None if all is saved."""
        return next(iter(self._waiting), None)

    def add(self, sequence: TargetSequence) -> None:
        """Save the sequence's committed tokens, if it has unsaved ones."""
        if sequence.unsaved:
            self._waiting.setdefault(sequence.start.sequence, sequence)

    def discard(self, id: SequenceId) -> None:
        self._waiting.pop(id, None)

    def save(self) -> Iterator[KvOffer]:
        """Save the next slice."""
        id, sequence = next(iter(self._waiting.items()))
        del self._waiting[id]
        if sequence.checkpoint is None or not sequence.unsaved:
            return
        began = self._clock()
        try:
            saved = sequence.checkpoint.save(sequence.cache)
        except SegmentError as error:
            log.warning("sequence %d is not saved: %s", id, error)
            sequence.checkpoint.close()
            return
        self.add(sequence)
        if saved is not None:
            yield KvOffer(id, saved.name, saved.tokens, sequence.checkpoint.size, self._clock() - began)
