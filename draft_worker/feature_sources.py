"""Where a draft finds features of the target: in a ring on this machine, or in blocks from another one."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from protocol.errors import PipelineError
from protocol.messages.features import FeatureForm, FeatureShipment

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_KEPT_BYTES = 64 << 20
"""Of the rows that came from another machine, for each sequence."""


class FeatureSource(Protocol):
    """Features of one sequence by their positions in the conversation."""

    @property
    def form(self) -> FeatureForm:
        """What a row holds."""
        ...

    @property
    def available(self) -> range:
        """The positions whose features are there now."""
        ...

    def read(self, first: int, count: int, outputs: Sequence[int]) -> "NDArray[np.float32] | None":
        """(count, elements) of the tokens from position `first` on, all finite; None if they are not all there,
        or are damaged."""
        ...

    def close(self) -> None: ...


Attach: TypeAlias = Callable[[str], FeatureSource | None]
"""The feature ring of a name; None if it can't be read."""


def attached_ring(name: str, epoch: int | None = None) -> FeatureSource | None:
    """The ring of this name; None if there is none, or if it is not of the pipeline run `epoch`."""
    # It imports NumPy, which some engines do without.
    from protocol.features.ring import FeatureRing

    try:
        ring = FeatureRing.attach(name)
    except PipelineError:
        return None
    if epoch not in (None, ring.epoch):
        ring.close()
        return None
    return ring


class ReceivedBlocks:
    """The latest rows without a gap, as they came from another machine."""

    def __init__(self, form: FeatureForm) -> None:
        self.form = form
        """Of the present rows; at first what the draft reads."""
        self._reads = form
        self._blocks: list[NDArray[np.float32]] = []
        self.available = range(0)

    def add(self, shipment: FeatureShipment) -> None:
        """A block. A damaged one, and one of another form, is dropped; one behind a gap, and the first one that is
        projected or no longer is, replaces the earlier ones."""
        from protocol.features.blocks import received

        block = shipment.block
        rows = received(block, shipment.payload) if self._reads.reads(block.form) else None
        if rows is None or block.first < self.available.stop:
            return
        if block.first > self.available.stop or block.form != self.form:
            self.form, self._blocks = block.form, []
        self._blocks.append(rows)
        while len(self._blocks) > 1 and sum(each.nbytes for each in self._blocks) > _KEPT_BYTES:
            del self._blocks[0]
        stop = block.first + len(rows)
        self.available = range(stop - sum(map(len, self._blocks)), stop)

    def read(self, first: int, count: int, outputs: Sequence[int]) -> "NDArray[np.float32] | None":
        """As `FeatureRing.read`."""
        import numpy as np

        if not self.available.start <= first <= first + count <= self.available.stop:
            return None
        begin, parts = self.available.start, []
        for block in self._blocks:
            part = block[max(0, first - begin) : max(0, first + count - begin)]
            begin += len(block)
            parts += [part] if len(part) else []
        return np.concatenate(parts)

    def close(self) -> None:
        self._blocks = []
