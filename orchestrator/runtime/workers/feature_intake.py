"""Writes the features that a target on another machine sends into rings of this process, which drafts read as usual.

Forms come from what the target was asked for, never from the sender. Knows no sockets. The numbers themselves can't be
checked: wrong ones cost acceptance, and no token.
"""

import logging

from protocol.features.blocks import whole
from protocol.features.ring import FeatureRing
from protocol.kv.arena_header import ElementType
from protocol.kv.segments import SegmentError
from protocol.messages.base import SequenceId
from protocol.messages.features import FeatureBlock, FeatureForm, Features, Tap, Taps

log = logging.getLogger(__name__)


class FeatureIntake:
    """One ring for each sequence that the target serves, from its first block on."""

    def __init__(self, taps: Taps, epoch: int, fingerprint: str) -> None:
        """`taps`: what the target can record. `fingerprint`: of its weights."""
        self._taps = taps
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._form: FeatureForm | None = None
        """What it was told to record."""
        self._rings: dict[SequenceId, FeatureRing | None] = {}
        """None until a block comes."""
        self._warned = False
        self.dropped = 0
        """Blocks that are damaged, that nobody asked for, or that were overtaken."""

    def tap(self, tap: Tap) -> None:
        """The target is told to record these outputs, in new rings."""
        for sequence in list(self._rings):
            self._renew(sequence)
        self._form = FeatureForm(tap.outputs, self._taps.width, tap.projection) if tap.outputs else None

    def begin(self, sequence: SequenceId) -> None:
        """The target is told to serve this sequence, perhaps again."""
        self._renew(sequence)

    def end(self, sequence: SequenceId) -> None:
        """The target serves it no longer."""
        self._renew(sequence)
        self._rings.pop(sequence, None)

    def close(self) -> None:
        """The target is gone."""
        for sequence in list(self._rings):
            self.end(sequence)

    def add(self, block: FeatureBlock, payload: bytes) -> Features | None:
        """Write a block; returns what a target of this machine would say of it. Blocks come in order, perhaps with
        gaps."""
        asked = self._form is not None and self._form.reads(block.form) and block.sequence in self._rings
        rows = whole(block, payload) if asked else None
        ring = None if rows is None else self._ring_for(block)
        fits = ring is not None and (ring.form, ring.layout.element) == (block.form, block.element)
        if rows is None or ring is None or not fits or block.first < ring.available.stop:
            self.dropped += 1
            return None
        ring.write(block.first, rows)
        first = max(block.first, ring.available.start)
        return Features(block.sequence, block.round, ring.name, first, block.first + block.rows - first)

    def _ring_for(self, block: FeatureBlock) -> FeatureRing | None:
        """The ring of the block's sequence, made for its form if there is none; None without shared memory."""
        ring = self._rings[block.sequence]
        if ring is None:
            element = ElementType(block.element)
            try:
                ring = FeatureRing.create(block.form, element, fingerprint=self._fingerprint, epoch=self._epoch)
            except SegmentError as error:
                if not self._warned:
                    log.warning("drafts get no features of the target: %s", error)
                    self._warned = True
                return None
            self._rings[block.sequence] = ring
        return ring

    def _renew(self, sequence: SequenceId) -> None:
        """The sequence has no ring, until a block comes."""
        ring = self._rings.get(sequence)
        if ring is not None:
            ring.unlink()
            ring.close()
        self._rings[sequence] = None
