"""The offset of another process's clock, from probes with a round trip. Pure."""

from collections import deque
from typing import NamedTuple


class Offset(NamedTuple):
    """In nanoseconds: the other clock minus ours is `ahead`, with an error of at most `error`."""

    ahead: int
    error: int
    """Half the round trip of the best probe."""


class ClockProbes:
    """Keeps the best of many probes: the one with the shortest round trip, after NTP's clock filter
    (RFC 5905, section 10). A probe of a busy peer takes long and has a large error."""

    def __init__(self) -> None:
        self.best: Offset | None = None
        self.count = 0

    def add(self, sent: int, theirs: int, received: int) -> None:
        """Sent at `sent` and answered at `received` on our clock; `theirs` is the time on the other clock."""
        self.count += 1
        error = (received - sent + 1) // 2
        if error >= 0 and (self.best is None or error < self.best.error):
            self.best = Offset(theirs - (sent + received) // 2, error)


class RecentProbes:
    """The best of the last 16 probes: links change and clocks drift."""

    _CAPACITY = 16

    def __init__(self) -> None:
        self._offsets: deque[Offset] = deque(maxlen=self._CAPACITY)

    def add(self, sent: int, theirs: int, received: int) -> None:
        """As in ClockProbes."""
        one = ClockProbes()
        one.add(sent, theirs, received)
        if one.best is not None:
            self._offsets.append(one.best)

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def best(self) -> Offset | None:
        return min(self._offsets, key=lambda offset: offset.error, default=None)
