"""The feature rings of a target's sequences: what forwards recorded of committed tokens, in shared memory.

Features are never needed: without shared memory, drafts go on without them. Where the orchestrator is on another
machine, which can't open a ring of this one, it gets the rows as blocks, behind the verdict and few at a time.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from msgspec.structs import replace

from protocol.features.outlet import FeatureOutlet
from protocol.features.ring import FeatureRing
from protocol.inference.tap import LayerTap
from protocol.kv.segments import SegmentError, sweep
from protocol.messages.base import RequestId
from protocol.messages.features import (
    FeatureForm,
    Features,
    FeatureShipment,
    Outputs,
    Tap,
    Taps,
)
from target_worker.engine import TargetSequence

log = logging.getLogger(__name__)
_UNDER_WAY = 2
"""Blocks on their way to another machine: 1 MiB, for which a gigabit link takes 9 ms. The next verdict waits behind
them if its forward is shorter than that."""
Announcement: TypeAlias = Features | FeatureShipment


class FeatureRings:
    """One ring a sequence, from its first recorded rows on, all with the outputs that the last Tap named."""

    def __init__(
        self,
        tap: LayerTap,
        record: Callable[[Outputs], None],
        *,
        fingerprint: str,
        epoch: int,
        remote: bool = False,
    ) -> None:
        """`tap`: what is recorded; `record` changes that. The rings are this process's: the next target removes those
        of one that crashed. `remote`: the orchestrator is on another machine."""
        self._tap = tap
        self._record = record
        self._fingerprint = fingerprint
        self._epoch = epoch
        self._rings: dict[RequestId, FeatureRing | None] = {}
        """None for a sequence that got no memory."""
        self._swept = False
        self._warned = False
        self._remote = remote
        self._outlet: FeatureOutlet | None = None
        self._sent = 0
        """Blocks so far."""

    @property
    def taps(self) -> Taps:
        return self._tap.taps

    def record(self, tap: Tap) -> None:
        """Record these outputs of all sequences from now on, in new rings; nothing if there are none."""
        form = FeatureForm(tap.outputs, self.taps.width) if tap.outputs else None
        lack = self.taps.lack(form) if form else ""
        if lack:
            log.warning("nothing is recorded for a draft: %s", lack)
            form = None
        if (form.outputs if form else ()) != self._tap.outputs:
            for sequence in list(self._rings):
                self.end(sequence)
            self._record(form.outputs if form else ())
            self._outlet = FeatureOutlet(form, _UNDER_WAY) if form and self._remote else None
        self.started()

    def started(self) -> None:
        """A sequence begins: what was lost on its way to another machine holds up nothing any more,
        unless it may be under way for another sequence."""
        if self._outlet is not None and not self._rings:
            self._outlet.acknowledge(self._sent)

    def taken(self, number: int) -> Iterator[FeatureShipment]:
        """The orchestrator has the blocks up to this one: the next ones."""
        if self._outlet is not None and self._outlet.acknowledge(number):
            yield from self._due()

    def written(
        self, sequence: TargetSequence, first: int, entries: Sequence[int] | None = None
    ) -> Iterator[Announcement]:
        """Write what the sequence's last forward recorded of its committed tokens from position `first` on.

        `entries`: those of the forward's tokens that were committed; None for all. Nothing is written if nothing was
        recorded, or not what the last Tap named.
        """
        recorded, sequence.cache.recorded = sequence.cache.recorded, None
        if recorded is None or recorded.outputs != self._tap.outputs:
            return
        ring = self._ring(sequence.start.request)
        if ring is None:
            return
        rows = np.asarray(recorded.rows)
        rows = rows if entries is None else rows[list(entries)]
        ring.write(first, rows)
        begin = max(first, ring.available.start)
        features = Features(sequence.start.request, sequence.round, ring.name, begin, first + len(rows) - begin)
        if not self._remote:
            yield features
        elif self._outlet is not None:
            self._outlet.announce(features)
            yield from self._due()

    def end(self, sequence: RequestId) -> None:
        """The sequence has ended, or starts anew."""
        ring = self._rings.pop(sequence, None)
        if self._outlet is not None:
            self._outlet.forget(sequence)
        if ring is not None:
            ring.unlink()
            ring.close()

    def _due(self) -> Iterator[FeatureShipment]:
        """The blocks for which there is room on the way."""
        assert self._outlet is not None
        due = self._outlet.due()
        for block, payload in due.blocks:
            self._sent += 1
            due.sent(1, self._sent)
            yield FeatureShipment(replace(block, number=self._sent), payload)

    def _ring(self, sequence: RequestId) -> FeatureRing | None:
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
