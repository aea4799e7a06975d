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

    def __init__(self, kept: int | None = None) -> None:
        """`kept`: the last probes, of which the best one counts, since links change and clocks drift; None for all."""
        self._offsets: deque[Offset] = deque(maxlen=kept)

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, sent: int, theirs: int, received: int) -> None:
        """Sent at `sent` and answered at `received` on our clock; `theirs` is the time on the other clock."""
        error = (received - sent + 1) // 2
        if error >= 0:
            self._offsets.append(Offset(theirs - (sent + received) // 2, error))

    @property
    def best(self) -> Offset | None:
        return min(self._offsets, key=lambda offset: offset.error, default=None)
