"""Makes a forward last as long as on a slower device. Knows no device, model or message flow.

The real work is always done; the rest of the device's time is slept. Clock and sleep are arguments.
"""

import sys
import time
from collections.abc import Callable

import msgspec

from protocol.messages.worker import Paced


def spin_seconds(system: str) -> float:
    """Time to spin after a sleep: longer than the usual delay of a wake-up. It is 0.1 ms at the median on Linux; macOS
    may delay a timer of t by min(t / 8, 1 ms) (XNU, osfmk/arm/arm_timer.c, and timer_call_slop in timer_call.c)."""
    return 1.5e-3 if system == "darwin" else 2e-4


_SPIN_SECONDS = spin_seconds(sys.platform)


class DevicePace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The times of one device with one model."""

    steps: tuple[tuple[int, float], ...]
    """Points (tokens of one forward, seconds), at least one, by rising tokens; linear interpolation in between."""
    prefill_rate: float
    """Tokens a second."""
    slow_down: float = 1.0
    """Factor on every time, for a device that shares its memory bandwidth with another one."""

    def forward(self, tokens: int) -> float:
        """Seconds of one forward. After the last point its slope continues, before the first one it is constant."""
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
    """Sleep, but spin at the end, because wake-ups are late."""
    end = time.perf_counter() + seconds
    if seconds > _SPIN_SECONDS:
        time.sleep(seconds - _SPIN_SECONDS)
    while time.perf_counter() < end:
        pass


class Pacer:
    """Holds one worker to a pace and counts overruns. Without a pace it does nothing."""

    def __init__(
        self,
        pace: DevicePace | None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = sleep_precisely,
    ) -> None:
        self._pace = pace
        self._clock = clock
        self._sleep = sleep
        self._paced = Paced()

    def forward(self, began: float, tokens: int) -> None:
        """Return when the device would have finished a forward over `tokens` tokens that began at `began`, or later."""
        if self._pace is not None:
            self._hold(began, self._pace.forward(tokens))

    def prefill(self, began: float, tokens: int) -> None:
        """As `forward`, for a chunk of a prompt."""
        if self._pace is not None:
            self._hold(began, self._pace.prefill(tokens))

    def take(self) -> Paced | None:
        """Counts since the last call; None without a pace."""
        if self._pace is None:
            return None
        paced, self._paced = self._paced, Paced()
        return paced

    def _hold(self, began: float, seconds: float) -> None:
        remaining = began + seconds - self._clock()
        if remaining > 0.0:
            self._sleep(remaining)
        excess = max(0.0, self._clock() - began - seconds)
        self._paced += Paced(forwards=1, overruns=int(remaining < 0.0), seconds=seconds, excess=excess)
