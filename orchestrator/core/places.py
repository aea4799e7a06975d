"""Which requests are decoded, and which wait for a place among them. Pure."""

from collections import deque

from protocol.messages.base import SequenceId


class Places:
    """Requests get places in the order of their arrival, and again when they come back from making room."""

    def __init__(self, most: int, turn: int) -> None:
        """At most so many places; after a `turn` of so many tokens a request makes room for one that waits."""
        self._most = most
        self._turn = turn
        self._served: dict[SequenceId, int] = {}
        """Tokens since each got its place."""
        self._waiting: deque[SequenceId] = deque()

    def ask(self, sequence: SequenceId) -> bool:
        """Whether there is a place at once; otherwise the request waits for one."""
        if len(self._served) < self._most:
            self._served[sequence] = 0
            return True
        self._waiting.append(sequence)
        return False

    def leave(self, sequence: SequenceId) -> SequenceId | None:
        """The request is over; who gets its place, if it had one and somebody waits."""
        if self._served.pop(sequence, None) is None:
            self._waiting.remove(sequence)
            return None
        return self._next()

    def advanced(self, sequence: SequenceId, tokens: int) -> SequenceId | None:
        """It has got more tokens; whoever takes its place now, if its turn is over and somebody waits."""
        self._served[sequence] += tokens
        if self._served[sequence] < self._turn or not self._waiting:
            return None
        del self._served[sequence]
        successor = self._next()
        self._waiting.append(sequence)
        return successor

    def _next(self) -> SequenceId | None:
        if not self._waiting:
            return None
        successor = self._waiting.popleft()
        self._served[successor] = 0
        return successor
