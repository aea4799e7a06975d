"""When a worker that died is started again. Pure."""

from collections import deque

_WINDOW = 60.0
_DEATHS = 3
_BACKOFF = (0.0, 0.5, 2.0)
"""Seconds before the next start after the first, second and third death within a minute."""


class RestartPolicy:
    """The circuit breaker of one role: it opens after three deaths within a minute."""

    def __init__(self) -> None:
        self._deaths: deque[float] = deque()

    def died(self, now: float) -> float | None:
        """A worker died: seconds to wait before the restart, or None for no restart."""
        self._deaths.append(now)
        while self._deaths[0] < now - _WINDOW:
            self._deaths.popleft()
        return None if len(self._deaths) >= _DEATHS else _BACKOFF[len(self._deaths) - 1]

    def pardon(self) -> bool:
        """The deaths until now had a cause that is gone. Returns whether the breaker was open."""
        opened = len(self._deaths) >= _DEATHS
        self._deaths.clear()
        return opened
