"""The target's features on their way into one sequence's engine: where they are, which are missing, how long to wait.

They lie in a ring on this machine, or come in blocks from another one. Features that are late, lost or damaged cost
acceptance, nothing else. Pure over a source of features and a clock.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from draft_worker.engine_interface import EngineSequence
from protocol.errors import PipelineError
from protocol.messages.features import FeatureForm, Features, FeatureShipment
from protocol.speculation.rolling_context import RollingContext

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
        """Of what the draft reads."""
        self._blocks: list[NDArray[np.float32]] = []
        self.available = range(0)

    def add(self, shipment: FeatureShipment) -> None:
        """A block. A damaged one, and one of another form, is dropped; one behind a gap replaces the earlier ones."""
        from protocol.features.blocks import received

        block = shipment.block
        rows = received(block, shipment.payload) if block.form == self.form else None
        if rows is None or block.first < self.available.stop:
            return
        if block.first > self.available.stop:
            self._blocks = []
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


LARGEST = 6e4
"""Half precision ends at 65,504; states of a healthy model are below."""
HOLD_SECONDS = 0.15
"""How long the first growth step below a new root waits for the features of the tokens before that root."""
_ROWS = 512
"""Tokens whose features are read at once, at most."""


class FeatureFeed:
    """Feeds the engine in order, each token once. After a change of the tokens it reads again what is still there."""

    def __init__(self, form: FeatureForm, rolling: RollingContext, clock: Callable[[], float], attach: Attach) -> None:
        """`clock`: seconds, monotonic."""
        self._form = form
        self._rolling = rolling
        self._clock = clock
        self._attach = attach
        self._source: FeatureSource | None = None
        self._name = ""
        self._announced = 0
        """Features of the positions below this one were announced, or never will be."""
        self._unusable_until = 0
        """Features of the positions below this one are not read again."""
        self._wait_until = math.inf
        """When the wait for features ends; infinite while the target prefills the prompt."""
        self._complete = False
        """Nothing is missing before the present root that could still come."""

    # Waiting ----------------------------------------------------------------------------------

    def started(self, prompt: bool) -> None:
        """A Start. `prompt`: the target is about to prefill the tokens, and announces their features chunk by chunk."""
        self._wait_until = math.inf if prompt else self._clock() + HOLD_SECONDS

    def rerooted(self) -> None:
        """A verdict: the features of its tokens should follow at once."""
        until = self._clock() + HOLD_SECONDS
        # Roots that follow one another without features prolong no wait, and begin none after one in vain.
        self._wait_until = until if self._complete else min(self._wait_until, until)

    @property
    def waiting(self) -> bool:
        """Features are missing that should still be waited for."""
        return not self._complete and self._clock() < self._wait_until

    # Reading ----------------------------------------------------------------------------------

    def announce(self, message: Features) -> None:
        """A ring holds features of this sequence."""
        if message.name != self._name:
            self.close()
            self._source = self._attach(message.name)
            # What can't be attached now is tried again at the next announcement.
            self._name = message.name if self._source is not None else ""
            self._announced = self._unusable_until = 0
        self._announced = max(self._announced, message.first + message.rows)

    def receive(self, shipment: FeatureShipment) -> None:
        """Features of this sequence from another machine."""
        if not isinstance(self._source, ReceivedBlocks):
            self.close()
            self._source = ReceivedBlocks(self._form)
            self._announced = self._unusable_until = 0
        self._source.add(shipment)
        self._announced = max(self._announced, shipment.block.first + shipment.block.rows)

    def feed(self, engine: EngineSequence, length: int) -> None:
        """Feed what is there of the features that the engine lacks, until it has to read them.

        The engine has committed all tokens that it sees of the `length` tokens before the root.
        """
        index = engine.committed - engine.staleness
        while index < engine.committed and not engine.unread:
            position, count = self._rolling.run(index, length)
            first, rows = self._read(position, position + count)
            if rows is not None:
                engine.feed(index + first - position, rows.clip(-LARGEST, LARGEST))
                count = first - position + len(rows)
            index += count
        self._complete = engine.staleness == 0 or self._announced >= length

    def close(self) -> None:
        """Release the ring."""
        if self._source is not None:
            self._source.close()
        self._source, self._name = None, ""

    def _read(self, position: int, stop: int) -> "tuple[int, NDArray[np.float32] | None]":
        """The first features at or behind `position` and before `stop`, with their position; None if there are none."""
        while self._source is not None:
            there = self._source.available
            first = max(position, self._unusable_until, there.start)
            count = min(stop, there.stop, first + _ROWS) - first
            if count <= 0:
                break
            rows = self._source.read(first, count, self._form.outputs)
            if rows is not None and rows.shape == (count, self._form.elements):
                return first, rows
            if self._source.available.start <= first:
                # They were not overwritten during the reading, but are damaged.
                self._unusable_until = first + count
        return stop, None
