"""Limits how many choices are generated at once: a request beyond the limit is refused at once. Pure."""

from orchestrator.http.errors import ApiError

_RETRY_SECONDS = 1


class AdmissionLimit:
    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0

    def take(self, count: int) -> None:
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

    def release(self, count: int) -> None:
        self.taken -= count
