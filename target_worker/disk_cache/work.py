"""The disk cache between a target's other work: prompts that wait for what a thread reads, turns that are kept.

Knows no messages.
"""

from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from protocol.inference.tree_sequence import TreeSequence
from protocol.messages.base import SequenceId
from target_worker.disk_cache.cache import DiskCache
from target_worker.disk_cache.kept_prefixes import DiskReading
from target_worker.engine import TargetSequence

_READING_SECONDS = 10.0
"""Until a prompt is prefilled although it has not been read."""
_PAUSE_SECONDS = 0.001
"""Between two looks at a disk for which alone the target waits. A message that arrives meanwhile waits as long."""


class _Waiting(NamedTuple):
    sequence: TargetSequence
    reading: DiskReading
    began: float


class DiskWork:
    """Without a disk cache there is no work."""

    def __init__(self, disk: DiskCache | None, empty: Callable[[], TreeSequence], clock: Callable[[], float]) -> None:
        """`empty`: makes an empty sequence."""
        self._disk = disk
        self._empty = empty
        self._clock = clock
        self._waiting: dict[SequenceId, _Waiting] = {}
        self._turn = False
        """The last unit of work was the disk's."""

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or (self._disk is not None and (self._disk.waits or self._disk.off))

    def read(self, sequence: TargetSequence) -> None:
        """Look for more of a new sequence's tokens than it has; it is not to be prefilled until `due` names it."""
        if self._disk is None:
            return
        reading = self._disk.read(sequence.prefix, sequence.prefilled)
        if reading is not None:
            self._waiting[sequence.start.sequence] = _Waiting(sequence, reading, self._clock())

    def reads(self, id: SequenceId) -> bool:
        return id in self._waiting

    def discard(self, id: SequenceId) -> None:
        waiting = self._waiting.pop(id, None)
        if waiting is not None:
            waiting.reading.give_up()

    def due(self) -> SequenceId | None:
        """A sequence that waits no longer, because its files are read or late. `take_up` is to follow."""
        now = self._clock()
        for id, waiting in self._waiting.items():
            if waiting.reading.ended or now - waiting.began >= _READING_SECONDS:
                return id
        return None

    def take_up(self, id: SequenceId) -> None:
        """Let the sequence begin with what was read."""
        sequence, reading, began = self._waiting.pop(id)
        assert self._disk is not None
        if not reading.ended:
            reading.give_up()
            sequence.warning = f"The disk cache took more than {_READING_SECONDS:.0f} s: its KV is not used."
            return
        sequence.warning = reading.warning
        cache = self._empty()
        if self._disk.resume(cache, reading):
            sequence.begin_with(cache)
            sequence.seconds = self._clock() - began

    def wait(self) -> None:
        """Shortly, for the files of the sequence that waits longest."""
        for waiting in islice(self._waiting.values(), 1):
            waiting.reading.wait(_PAUSE_SECONDS)

    def takes_turn(self, others: bool) -> bool:
        """Compute what the next file holds, unless `others` have work and it is their turn. Whether it was done."""
        self._turn = not self._turn or not others
        if not self._turn or self._disk is None or not self._disk.waits:
            return False
        self._disk.step()
        return True

    def turned_off(self) -> str:
        """Why the disk cache was turned off since the last call; empty if it was not."""
        return "" if self._disk is None else self._disk.turned_off()

    def settle(self, cache: TreeSequence) -> None:
        """Another sequence goes on with this KV of one that ended."""
        if self._disk is not None:
            self._disk.settle(cache)

    def keep(self, sequence: TargetSequence) -> None:
        """Keep an ended sequence."""
        if self._disk is not None:
            self._disk.keep(sequence.cache, sequence.prefix)
