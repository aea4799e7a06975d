"""A record of the state machine's events and times, and its replay. One JSON array a line."""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from orchestrator.core.events import Arrived, Ended, Event, Submitted, Tick, WorkerDown, WorkerUp
from protocol.errors import InputError

_EVENTS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Submitted, Ended, WorkerUp, WorkerDown, Arrived, Tick)
}


class Journal:
    """Appends each event to a file at once, so that the record of a killed orchestrator is whole; without a file it
    does nothing."""

    def __init__(self, file: IO[bytes] | None) -> None:
        self._file = file

    @classmethod
    def to(cls, path: str) -> "Journal":
        """Raises InputError for a file that can't be written."""
        try:
            return cls(Path(path).open("wb", buffering=0) if path else None)
        except OSError as error:
            raise InputError(f"The record {path} can't be written ({error.strerror}): choose another file.") from error

    def write(self, event: Event, now: float) -> None:
        if self._file is not None:
            self._file.write(msgspec.json.encode([now, type(event).__name__, event]) + b"\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def replay(path: Path) -> Iterator[tuple[Event, float]]:
    """The events of a journal and their times, in order."""
    with path.open("rb") as lines:
        for line in lines:
            now, kind, body = msgspec.json.decode(line)
            yield msgspec.convert(body, _EVENTS[kind], strict=False), now
