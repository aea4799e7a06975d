"""Makes a forward last as long as a slower device would take for it. Knows no device, model or message flow.

The real work is always done; what is left of the device's time is slept. Clock and sleep come in from outside.
"""

import time
from collections.abc import Callable

import msgspec

from protocol.messages.worker import Paced

_SPIN_SECONDS = 2e-4
"""Longer than a usual wake-up is late (0.1 ms at the median on Linux), shorter than anyone would miss the core."""


class DevicePace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long one device takes for one model."""

    steps: tuple[tuple[int, float], ...]
    """Points (tokens of one forward, seconds), at least one, by rising tokens; linear in between."""
    prefill_rate: float
    """Tokens a second."""
    slow_down: float = 1.0
    """Factor on every time, for a device that shares its memory with another one at work."""

    def forward(self, tokens: int) -> float:
        """Seconds of one forward. Behind the last point its slope goes on, before the first nothing is saved."""
        return self.slow_down * self._alone(tokens)

    def prefill(self, tokens: int) -> float:
        """Seconds of one prefill chunk, which takes no less than a forward of one token."""
        return max(self.forward(1), self.slow_down * tokens / self.prefill_rate)

    def _alone(self, tokens: int) -> float:
        if tokens <= self.steps[0][0] or len(self.steps) == 1:
            return self.steps[0][1]
        pairs = list(zip(self.steps, self.steps[1:], strict=False))
        (width, seconds), (wider, longer) = next((pair for pair in pairs if tokens <= pair[1][0]), pairs[-1])
        slope = (longer - seconds) / (wider - width)
        return seconds + slope * (tokens - width) if tokens <= wider else longer + max(0.0, slope) * (tokens - wider)


def sleep_precisely(seconds: float) -> None:
    """Sleep, and spin through the end of it, since a wake-up comes too late rather than too early."""
    end = time.perf_counter() + seconds
    if seconds > _SPIN_SECONDS:
        time.sleep(seconds - _SPIN_SECONDS)
    while time.perf_counter() < end:
        pass


class Pacer:
    """Holds one worker to a pace and counts what could not be held. Without a pace it does nothing."""

    def __init__(
        self,
        pace: DevicePace | None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = sleep_precisely,
    ) -> None:
        self._pace = pace
        self._clock = clock
        self._sleep = sleep
        self._done = Paced()

    def forward(self, began: float, tokens: int) -> None:
        """Return no sooner than the device would from a forward over `tokens` tokens begun at `began`."""
        if self._pace is not None:
            self._hold(began, self._pace.forward(tokens))

    def prefill(self, began: float, tokens: int) -> None:
        """The same for a chunk of a prompt."""
        if self._pace is not None:
            self._hold(began, self._pace.prefill(tokens))

    def take(self) -> Paced | None:
        """What was held since the last call; None without a pace."""
        if self._pace is None:
            return None
        done, self._done = self._done, Paced()
        return done

    def _hold(self, began: float, seconds: float) -> None:
        left = began + seconds - self._clock()
        if left > 0.0:
            self._sleep(left)
        excess = max(0.0, self._clock() - began - seconds)
        self._done += Paced(forwards=1, overruns=int(left < 0.0), seconds=seconds, excess=excess)
