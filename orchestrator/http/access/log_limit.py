"""Bounds the log lines that clients without the key can cause. Pure: the time is given."""

import logging
import time
from collections.abc import Callable

_SECONDS = 60.0


class LogLimit(logging.Filter):
    """Passes `most` warnings a minute; the next one says how many were left out. Errors, our own, all pass."""

    def __init__(self, most: int = 10, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._most = most
        self._clock = clock
        self._began = float("-inf")
        self._seen = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return True
        now = self._clock()
        if now - self._began >= _SECONDS:
            left_out = self._seen - self._most
            if left_out > 0:
                record.msg = f"{record.getMessage()} ({left_out} such lines were left out before.)"
                record.args = ()
            self._began, self._seen = now, 0
        self._seen += 1
        return self._seen <= self._most
