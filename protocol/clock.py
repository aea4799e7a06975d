"""How far another process's clock is ahead of ours, from probes that took some time. Pure."""

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
