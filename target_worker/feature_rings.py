"""The feature rings of a target's sequences: what forwards recorded of committed tokens, in shared memory.

Knows no message flow. Features are never needed: without shared memory, drafts go on without them.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from protocol.features.ring import FeatureRing
from protocol.kv.arena_header import ElementType
from protocol.kv.segments import SegmentError, sweep
from protocol.messages.base import SequenceId
from protocol.messages.features import FeatureForm, Features, Outputs, Taps
from target_worker.engine import TargetSequence

log = logging.getLogger(__name__)


class StateRecord(Protocol):
    """What a model records of its forwards, as a `LayerTap` does."""

    @property
    def taps(self) -> Taps: ...

    @property
    def element(self) -> ElementType: ...

    @property
    def outputs(self) -> Outputs: ...


class FeatureRings:
    """One ring a sequence, from its first recorded rows on, all with the outputs that the last Tap named."""

    def __init__(self, tap: "StateRecord", record: Callable[[Outputs], None], *, fingerprint: str, epoch: int) -> None:
        """`tap`: what is recorded; `record` changes that. The rings are this process's: the next target removes those
        of one that crashed."""
        self._tap = tap
        self._record = record
        self._fingerprint = fingerprint
        self._epoch = epoch
        self._rings: dict[SequenceId, FeatureRing | None] = {}
        """None for a sequence that got no memory."""
        self._swept = False
        self._warned = False

    @property
    def taps(self) -> Taps:
        return self._tap.taps

    def record(self, outputs: Outputs) -> None:
        """Record these outputs of all sequences from now on, in new rings; nothing if there are none."""
        lack = self.taps.lack(FeatureForm(outputs, self.taps.width)) if outputs else ""
        if lack:
            log.warning("nothing is recorded for a draft: %s", lack)
            outputs = ()
        if outputs != self._tap.outputs:
            for sequence in list(self._rings):
                self.end(sequence)
            self._record(outputs)

    def written(
        self, sequence: TargetSequence, first: int, entries: Sequence[int] | None = None
    ) -> tuple[Features, ...]:
        """Write what the sequence's last forward recorded of its committed tokens from position `first` on.

        `entries`: those of the forward's tokens that were committed; None for all. Nothing is written if nothing was
        recorded, or not what the last Tap named.
        """
        recorded, sequence.cache.recorded = sequence.cache.recorded, None
        if recorded is None or recorded.outputs != self._tap.outputs:
            return ()
        ring = self._ring(sequence.start.sequence)
        if ring is None:
            return ()
        rows = np.asarray(recorded.rows)
        rows = rows if entries is None else rows[list(entries)]
        ring.write(first, rows)
        begin = max(first, ring.available.start)
        return (Features(sequence.start.sequence, sequence.round, ring.name, begin, first + len(rows) - begin),)

    def end(self, sequence: SequenceId) -> None:
        """The sequence has ended, or starts anew."""
        ring = self._rings.pop(sequence, None)
        if ring is not None:
            ring.unlink()
            ring.close()

    def _ring(self, sequence: SequenceId) -> FeatureRing | None:
        if sequence not in self._rings:
            self._rings[sequence] = self._created()
        return self._rings[sequence]

    def _created(self) -> FeatureRing | None:
        form = FeatureForm(self._tap.outputs, self.taps.width)
        try:
            if not self._swept:
                sweep()
                self._swept = True
            return FeatureRing.create(form, self._tap.element, fingerprint=self._fingerprint, epoch=self._epoch)
        except SegmentError as error:
            if not self._warned:
                log.warning("drafts get no features of the target: %s", error)
                self._warned = True
            return None
