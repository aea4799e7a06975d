"""How many generations may be open at once; who comes when all seats are taken is sent away at once. Pure."""

from orchestrator.http.errors import ApiError

_RETRY_SECONDS = 1


class AdmissionLimit:
    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0

    def take(self, count: int) -> None:
        """Raises ApiError 429 if there is no room, 400 if there never will be."""
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

    def give_back(self, count: int) -> None:
        self.taken -= count
