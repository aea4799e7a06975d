"""The feature rings of a target's sequences: what forwards recorded of committed tokens, in shared memory.

Features are never needed: without shared memory, drafts go on without them. Where the orchestrator is on another
machine, which can't open a ring of this one, it gets the rows as blocks, behind the verdict and few at a time.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from msgspec.structs import replace

from protocol.features.blocks import projection_key
from protocol.features.outlet import FeatureOutlet
from protocol.features.ring import FeatureRing
from protocol.inference.layer_cache import ELEMENT_TYPES
from protocol.inference.tap import LayerTap
from protocol.kv.arena_header import ElementType
from protocol.kv.segments import SegmentError, sweep
from protocol.messages.base import RequestId
from protocol.messages.features import (
    FeatureForm,
    Features,
    FeatureShipment,
    Outputs,
    ProjectionShipment,
    ProjectionWanted,
    Tap,
    Taps,
)
from target_worker.engine import TargetSequence
from target_worker.recorded import RecordedFeatures

_MOST_BYTES = 512 << 20
"""Of a matrix. That of a drafter that reads five outputs of 5,120 numbers has 250 MiB."""
_TYPES = {element: kind for kind, element in ELEMENT_TYPES.items()}


class ProjectionIntake:
    """Asks for a matrix block after block, and checks the whole by its key. What is not the next block is dropped."""

    def __init__(self, form: FeatureForm) -> None:
        """`form`: that of the projected rows."""
        assert form.projection is not None
        self.form = form
        self.matrix: mx.array | None = None
        """(width of the projection, outputs * width), once it is there."""
        self.useless = False
        """It is too large, or what came was another one."""
        self._projection = form.projection
        self._blocks: list[bytes] = []
        self._rows = 0
        self._element: ElementType | None = None

    @property
    def wanted(self) -> ProjectionWanted | None:
        """What to ask for now; a request that was lost is repeated so."""
        if self.matrix is not None or self.useless:
            return None
        return ProjectionWanted(self._projection.key, self._rows)

    def add(self, shipment: ProjectionShipment) -> None:
        block, payload = shipment
        if self.wanted != ProjectionWanted(block.key, block.first):
            return
        element, rows = ElementType(block.element), self._rows + block.rows
        row_bytes = self.form.joined * element.size
        if self._projection.width * row_bytes > _MOST_BYTES or self._element not in (None, element):
            self._give_up()
        elif rows <= self._projection.width and len(payload) == block.rows * row_bytes:
            self._blocks.append(payload)
            self._rows, self._element = rows, element
            if rows == self._projection.width:
                self._finish(element)

    def _finish(self, element: ElementType) -> None:
        whole = b"".join(self._blocks)
        self._blocks = []
        if projection_key([whole]) != self._projection.key:
            self._give_up()
            return
        numbers = mx.array(np.frombuffer(whole, element.numpy_name).reshape(self._projection.width, self.form.joined))
        matrix = numbers.view(_TYPES[element]) if element is ElementType.BFLOAT16 else numbers
        # On a processor MLX's products in half precision take a hundred times as long.
        self.matrix = matrix.astype(mx.float32) if mx.default_device() == mx.Device(mx.cpu) else matrix
        mx.eval(self.matrix)

    def _give_up(self) -> None:
        self.useless, self._blocks = True, []


def projected(rows: Any, element: ElementType, matrix: mx.array) -> Any:
    """(L, width of the projection) of (L, outputs * width) recorded rows; both of this element type, bfloat16 as its
    bits."""
    numbers = mx.array(rows)
    if element is ElementType.BFLOAT16:
        numbers = numbers.view(mx.bfloat16)
    found = (numbers.astype(matrix.dtype) @ matrix.T).astype(_TYPES[element])
    return np.asarray(found.view(mx.uint16) if element is ElementType.BFLOAT16 else found)


log = logging.getLogger(__name__)
_UNDER_WAY = 2
"""Blocks on their way to another machine: 1 MiB, for which a gigabit link takes 9 ms. The next verdict waits behind
them if its forward is shorter than that."""
Announcement: TypeAlias = Features | FeatureShipment


class FeatureRings:
    """One ring a sequence, from its first recorded rows on, all with the outputs that the last Tap named."""

    def __init__(
        self,
        tap: LayerTap | RecordedFeatures,
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
        self._projection: ProjectionIntake | None = None
        self._remote = remote
        self._outlet: FeatureOutlet | None = None
        self._sent = 0
        """Blocks so far."""

    @property
    def taps(self) -> Taps:
        return self._tap.taps

    def record(self, tap: Tap) -> Iterator[ProjectionWanted]:
        """Record these outputs of all sequences from now on, in new rings; nothing if there are none."""
        form = FeatureForm(tap.outputs, self.taps.width, tap.projection) if tap.outputs else None
        lack = self.taps.lack(form) if form else ""
        if lack:
            log.warning("nothing is recorded for a draft: %s", lack)
            form = None
        if (form.outputs if form else ()) != self._tap.outputs or form != self._form:
            for sequence in list(self._rings):
                self.end(sequence)
            self._record(form.outputs if form else ())
            self._projection = ProjectionIntake(form) if form and form.projection else None
            self._outlet = FeatureOutlet(form, _UNDER_WAY) if form and self._remote else None
        yield from self.started()

    def started(self) -> Iterator[ProjectionWanted]:
        """A sequence begins: what was lost on its way to another machine, or from there, holds up nothing any more,
        unless it may be under way for another sequence."""
        if self._outlet is not None and not self._rings:
            self._outlet.acknowledge(self._sent)
        wanted = self._projection and self._projection.wanted
        if wanted is not None:
            yield wanted

    def take(self, shipment: ProjectionShipment) -> Iterator[ProjectionWanted]:
        """Rows of the matrix by which later sequences' rows are projected."""
        if self._projection is not None:
            before = self._projection.wanted
            self._projection.add(shipment)
            wanted = self._projection.wanted
            if wanted is not None and wanted != before:
                yield wanted

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
        if ring.form.projection is not None:
            assert self._projection is not None
            assert self._projection.matrix is not None
            rows = projected(rows, ring.layout.element, self._projection.matrix)
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

    @property
    def _form(self) -> FeatureForm | None:
        """What the last Tap named; its rows are projected once the matrix is there."""
        if not self._tap.outputs:
            return None
        projection = self._projection and self._projection.form.projection
        return FeatureForm(self._tap.outputs, self.taps.width, projection)

    def _ring(self, sequence: RequestId) -> FeatureRing | None:
        if sequence not in self._rings:
            self._rings[sequence] = self._created()
        return self._rings[sequence]

    def _created(self) -> FeatureRing | None:
        intake = self._projection
        projection = None if intake is None or intake.matrix is None else intake.form.projection
        form = FeatureForm(self._tap.outputs, self.taps.width, projection)
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
