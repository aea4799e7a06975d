"""Limits how much is done at once for all clients: a request beyond the limit is refused at once. Pure.

Each choice that is generated takes a place, and so does a request whose tokens are counted or embedded.
"""

from typing import Self

from orchestrator.http.errors import ApiError

_RETRY_SECONDS = 1


class AdmissionLimit:
    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0

    def take(self, count: int) -> "Places":
        """Take `count` places. Raises ApiError 429 if so many are not free, 400 if there are not so many."""
        if count > self.most:
            raise ApiError(400, f"This server generates at most {self.most} texts at once: ask for fewer.", param="n")
        if self.taken + count > self.most:
            raise ApiError(
                429,
                f"All {self.most} places of this server are taken: try again in a moment.",
                code="queue_full",
                headers={"retry-after": str(_RETRY_SECONDS)},
            )
        self.taken += count
        return Places(self, count)


class Places:
    """Places that were taken. A context, whose end releases them."""

    def __init__(self, limit: AdmissionLimit, count: int) -> None:
        self._limit = limit
        self._count = count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """May be called several times."""
        self._limit.taken -= self._count
        self._count = 0
