"""How many lines of a log others may cause: so many a minute. Pure."""

_SECONDS = 60.0


class LineLimit:
    def __init__(self, most: int) -> None:
        self._most = most
        self._began = float("-inf")
        self._seen = 0

    def take(self, now: float) -> int | None:
        """None if this line is to be left out; otherwise how many were since the last one, which it should say."""
        left_out = 0
        if now - self._began >= _SECONDS:
            left_out = max(0, self._seen - self._most)
            self._began, self._seen = now, 0
        self._seen += 1
        return left_out if self._seen <= self._most else None
