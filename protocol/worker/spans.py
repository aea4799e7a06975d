"""Records of a process's work: spans in a ring buffer of fixed size. Knows neither sockets nor models.

The orchestrator imports this and needs numpy for nothing else, so numpy is imported where spans are read.
"""

import struct
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


class SpanKind(IntEnum):
    """The kind of work of a span."""

    PREFILL = 1
    """One chunk of a prompt, or the adoption of its KV."""
    VERIFY = 2
    """The target, from reading a Verify to its verdict."""
    TIDY = 3
    """The target, after the verdict was sent; also a worker that saves its KV."""
    GROW = 4
    """One growth step of the draft."""
    STEP = 5
    """The orchestrator, from an event to the last of its commands."""
    WAIT = 6
    """The target is idle and the orchestrator deliberately waits for growth."""
    MESSAGE = 7
    """The orchestrator reads or sends a message."""


SPAN = [
    ("begin", "<i8"),
    ("end", "<i8"),
    ("sequence", "<i8"),
    ("round", "<i8"),
    ("serial", "<i8"),
    ("kind", "<i4"),
    ("tokens", "<i4"),
]
"""The fields of a span, for numpy. Times are nanoseconds on the process's own clock. `serial`: number of the Grow that
reported this growth step, counted from 1; 0 for other kinds."""

_RECORD = struct.Struct("<qqqqqii")
CAPACITY = 1 << 17
"""Spans in the ring: some minutes of decoding, 6 MB."""


class SpanRing:
    """The newest spans of a process. Adding one takes a fraction of a microsecond and allocates nothing."""

    def __init__(self, capacity: int = CAPACITY, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        """`clock` in nanoseconds, monotonic."""
        self.now = clock
        self.recorded = 0
        """Number of added spans, overwritten ones included."""
        self._capacity = capacity
        self._memory = bytearray(capacity * _RECORD.size)

    def add(
        self, kind: SpanKind, begin: int, end: int, sequence: int = 0, round: int = 0, tokens: int = 0, serial: int = 0
    ) -> None:
        offset = self.recorded % self._capacity * _RECORD.size
        _RECORD.pack_into(self._memory, offset, begin, end, sequence, round, serial, kind, tokens)
        self.recorded += 1

    @property
    def lost(self) -> int:
        """Number of overwritten spans."""
        return max(0, self.recorded - self._capacity)

    def spans(self) -> "np.ndarray":
        """(n,) SPAN, oldest first."""
        import numpy as np

        spans = np.frombuffer(self._memory, SPAN)
        return np.roll(spans, -(self.recorded % self._capacity)) if self.lost else spans[: self.recorded]

    def save(self, path: Path) -> None:
        """Write the spans, for `load_spans`."""
        import numpy as np

        with path.open("wb") as file:
            np.savez(file, spans=self.spans(), lost=np.int64(self.lost))


def load_spans(path: Path) -> "tuple[np.ndarray, int]":
    """(n,) SPAN, oldest first, and the number of overwritten ones. Raises ValueError for another file."""
    import numpy as np

    with np.load(path, allow_pickle=False) as file:
        if file["spans"].dtype != SPAN:
            raise ValueError(f"{path} holds no spans")
        return file["spans"], int(file["lost"])
