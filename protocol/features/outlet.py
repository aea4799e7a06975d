"""What one reader on another machine gets of the target's features: read from this machine's rings, as blocks.

Few blocks are under way at once, so that no message waits long behind them. What a ring loses meanwhile is never sent.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from protocol.errors import PipelineError
from protocol.features.blocks import halved, shipments
from protocol.features.ring import FeatureRing
from protocol.kv.arena_header import ElementType
from protocol.messages.base import RequestId, Round
from protocol.messages.features import FeatureForm, Features, FeatureShipment
from protocol.messages.remote import MAX_PAYLOAD

UNDER_WAY = 4
"""Blocks that were not acknowledged: 2 MiB, for which a gigabit link takes 17 ms."""


@dataclass(slots=True)
class _Unsent:
    """Features of one sequence that are announced and not sent: at first all that the ring holds."""

    ring: FeatureRing
    round: Round
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class DueBlocks:
    """What an outlet sends now."""

    blocks: list[FeatureShipment]
    _under_way: dict[float, int]
    """Of the outlet."""

    def sent(self, blocks: int, number: float) -> None:
        """So many of the blocks were sent: they are under way until this number, or a later one, is acknowledged."""
        self._under_way[number] = blocks


@dataclass(slots=True)
class FeatureOutlet:
    """What one reader gets: the outputs of `form`, in half precision, of all its sequences."""

    form: FeatureForm
    most: int = UNDER_WAY
    """Blocks under way at once."""
    _unsent: dict[RequestId, _Unsent] = field(default_factory=dict)
    _under_way: dict[float, int] = field(default_factory=dict)
    """Blocks by the number that acknowledges them."""

    def announce(self, message: Features) -> None:
        """A ring of this machine holds features. A ring that can't be read is ignored."""
        unsent = self._unsent.get(message.request)
        if unsent is None or unsent.ring.name != message.name:
            self.forget(message.request)
            try:
                ring = FeatureRing.attach(message.name)
            except PipelineError:
                return
            unsent = self._unsent[message.request] = _Unsent(ring, message.round, 0, 0)
        unsent.round = message.round
        unsent.stop = max(unsent.stop, message.first + message.rows)

    def due(self) -> DueBlocks:
        """The blocks for which there is room now. They are returned once, whether or not they are sent."""
        room = self.most - sum(self._under_way.values())
        return DueBlocks(list(islice(self._blocks(), max(0, room))), self._under_way)

    def acknowledge(self, number: float) -> bool:
        """The reader has what was sent up to this number. Returns whether that makes room."""
        answered = [each for each in self._under_way if each <= number]
        for each in answered:
            del self._under_way[each]
        return bool(answered)

    def forget(self, sequence: RequestId) -> None:
        """The reader is to get no more of this sequence."""
        unsent = self._unsent.pop(sequence, None)
        if unsent is not None:
            unsent.ring.close()

    def close(self) -> None:
        for sequence in list(self._unsent):
            self.forget(sequence)

    def _blocks(self) -> Iterator[FeatureShipment]:
        for sequence, unsent in self._unsent.items():
            yield from self._blocks_of(sequence, unsent)

    def _blocks_of(self, sequence: RequestId, unsent: _Unsent) -> Iterator[FeatureShipment]:
        ring, form = unsent.ring, self.form
        most = MAX_PAYLOAD // (form.elements * ElementType.FLOAT16.size)
        while most:
            there = ring.available
            first = max(unsent.first, there.start)
            count = min(unsent.stop, there.stop, first + most) - first
            if count <= 0:
                return
            rows = ring.copied(first, count, form.outputs)
            unsent.first = first + count if rows is not None or ring.available.start <= first else first
            if rows is not None:
                yield from shipments(sequence, unsent.round, first, form, *halved(rows, ring.layout.element))
