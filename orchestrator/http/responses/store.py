"""Answers that clients may refer to later: the latest ones, in memory, up to a number of bytes. Pure."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from orchestrator.http.errors import ApiError


class StoredTurn(msgspec.Struct):
    """One answer, and the items of its conversation, its own among them."""

    answer: dict[str, Any]
    items: list[dict[str, Any]]


class ResponseStore:
    """Holds as many turns as fit into `most_bytes`; whoever was not asked for for longest goes first."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._turns: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def keep(self, id: str, answer: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> None:
        encoded = msgspec.json.encode({"answer": answer, "items": items})
        self._turns[id] = encoded
        self._bytes += len(encoded)
        while self._bytes > self._most_bytes:
            self._drop(next(iter(self._turns)))

    def recall(self, id: str, status: int = 404, param: str | None = None) -> StoredTurn:
        """Raises ApiError of that status if it is not there, or no longer."""
        if id not in self._turns:
            raise ApiError(
                status,
                f"There is no response {id!r} here, or no longer: send the conversation itself as input.",
                code="previous_response_not_found" if param else "not_found",
                param=param,
            )
        self._turns.move_to_end(id)
        return msgspec.json.decode(self._turns[id], type=StoredTurn)

    def forget(self, id: str) -> None:
        """Raises ApiError 404 if it is not there."""
        self.recall(id)
        self._drop(id)

    def _drop(self, id: str) -> None:
        self._bytes -= len(self._turns.pop(id))
