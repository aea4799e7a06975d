"""How far another process's clock is ahead of ours, from probes that took some time. Pure."""

from collections import deque
from typing import NamedTuple


class Offset(NamedTuple):
    """Nanoseconds. Their clock minus ours is `ahead`, give or take `error`."""

    ahead: int
    error: int
    """Half the round trip of the best probe."""


class ClockProbes:
    """Keeps the best of many probes: the one with the shortest round trip, after NTP's clock filter
    (RFC 5905, section 10). A probe that met a busy peer takes long and says little."""

    def __init__(self) -> None:
        self.best: Offset | None = None
        self.count = 0

    def add(self, sent: int, theirs: int, received: int) -> None:
        """We asked at `sent`, they read `theirs` on their clock, and we had the answer at `received`."""
        self.count += 1
        error = (received - sent + 1) // 2
        if error >= 0 and (self.best is None or error < self.best.error):
            self.best = Offset(theirs - (sent + received) // 2, error)


class RecentProbes:
    """The best of the last few probes, since links change and clocks drift."""

    _KEPT = 16

    def __init__(self) -> None:
        self._offsets: deque[Offset] = deque(maxlen=self._KEPT)

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
