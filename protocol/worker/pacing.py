"""Makes a forward last as long as on a slower device. Knows no device, model or message flow.

The real work is always done; the rest of the device's time is slept. Clock and sleep are arguments.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import msgspec

from protocol.messages.worker import Paced

_FEW_QUERIES, _QUERY_BLOCK = 8, 32
"""Most queries of MLX's attention kernels for few queries, and queries of one block of the kernel for many
(mlx/backend/metal/scaled_dot_product_attention.cpp, steel_attention.metal)."""
_BLOCK_READINGS = 16
"""Readings of the KV at the device's bandwidth that take as long as one block, which goes through all keys alone:
17 on an M5 Max and 14 on an M3 Max, behind 16,384 and 32,768 tokens alike (mlx issue 3826)."""
StepShape = Literal["line", "steps"]
MEASURED_WIDTHS = range(1, 18)
"""Tokens of the forwards that a worker measures when it loads its model."""


def spin_seconds(system: str) -> float:
    """Time to spin after a sleep: longer than the usual delay of a wake-up. It is 0.1 ms at the median on Linux; macOS
    may delay a timer of t by min(t / 8, 1 ms) (XNU, osfmk/arm/arm_timer.c, and timer_call_slop in timer_call.c)."""
    return 1.5e-3 if system == "darwin" else 2e-4


_SPIN_SECONDS = spin_seconds(sys.platform)


class PacedPart(NamedTuple):
    """One sequence's part of a forward."""

    tokens: int
    context: int = 0
    """Tokens of the sequence whose KV was there before."""


class DevicePace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The times of one device with one model.

    A forward over sequences i with w_i tokens behind contexts of c_i tokens takes

        slow_down (T(sum w_i) + context_seconds sum reads(w_i) c_i + (number of sequences - 1) sequence_seconds)

    T are the `steps`: matrix products serve all sequences together. Attention is computed sequence by sequence. With
    `vector_queries`, that is by MLX's kernels for Metal, it takes the time of a reading of the context's KV for every
    query up to 8, and of 16 readings for more, however few; else of one reading for 32 queries.
    """

    steps: tuple[tuple[int, float], ...]
    """Points (tokens of one forward, seconds), at least one, by rising tokens."""
    shape: StepShape = "line"
    """line: linear between two points. steps: a point holds down to the point before it. Beyond the last point the
    line through the last two continues."""
    prefill_rate: float
    """Tokens a second."""
    slow_down: float = 1.0
    """Factor on every time, for a device that shares its memory bandwidth with another one."""
    context_seconds: float = 0.0
    """Of reading the KV of one token."""
    vector_queries: int = 0
    """Most queries of the fused kernel for few queries. Those up to 8 that it does not serve are assumed to cost as
    much with it as without."""
    sequence_seconds: float = 0.0
    """Of another sequence's attention, without its context."""

    def forward(self, tokens: int, context: int = 0) -> float:
        """Seconds of one sequence's forward."""
        return self.joint((PacedPart(tokens, context),))

    def joint(self, parts: Sequence[PacedPart]) -> float:
        """Seconds of a forward over several sequences."""
        attention = self.context_seconds * sum(self._reads(part.tokens) * part.context for part in parts)
        further = (len(parts) - 1) * self.sequence_seconds
        return self.slow_down * (self._alone(sum(part.tokens for part in parts)) + attention + further)

    def prefill(self, tokens: int, context: int = 0) -> float:
        """Seconds of one prefill chunk, which takes no less than a forward of one token."""
        attention = self.context_seconds * self._reads(tokens) * context
        return max(self.forward(1, context), self.slow_down * (tokens / self.prefill_rate + attention))

    def _reads(self, queries: int) -> int:
        blocks = math.ceil(queries / _QUERY_BLOCK)
        if not self.vector_queries:
            return blocks
        return queries if queries <= _FEW_QUERIES else max(_BLOCK_READINGS, blocks)

    def _alone(self, tokens: int) -> float:
        if tokens <= self.steps[0][0] or len(self.steps) == 1:
            return self.steps[0][1]
        pairs = list(pairwise(self.steps))
        (width, seconds), (wider, longer) = next((pair for pair in pairs if tokens <= pair[1][0]), pairs[-1])
        slope = (longer - seconds) / (wider - width)
        if tokens > wider:
            return longer + max(0.0, slope) * (tokens - wider)
        return longer if self.shape == "steps" else seconds + slope * (tokens - width)


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

    @property
    def holds(self) -> bool:
        """Whether there is a pace."""
        return self._pace is not None

    def forward(self, began: float, parts: Sequence[PacedPart]) -> None:
        """Return when the device would have finished a forward over `parts` that began at `began`, or later."""
        if self._pace is not None:
            self._hold(began, self._pace.joint(parts))

    def prefill(self, began: float, part: PacedPart) -> None:
        """As `forward`, for a chunk of a prompt."""
        if self._pace is not None:
            self._hold(began, self._pace.prefill(*part))

    def costs(self) -> tuple[tuple[int, float], ...]:
        """Seconds of a forward by its tokens, as the device would measure them; empty without a pace."""
        pace = self._pace
        return () if pace is None else tuple((width, pace.forward(width)) for width in MEASURED_WIDTHS)

    def context_costs(self) -> tuple[tuple[int, float], ...]:
        """Seconds that 1,000 tokens of context add to such a forward; empty without a pace."""
        pace = self._pace
        if pace is None:
            return ()
        return tuple((width, pace.forward(width, 1000) - pace.forward(width)) for width in MEASURED_WIDTHS)

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
