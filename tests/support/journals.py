"""What `--record` wrote, read back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.core.events import Arrived, Ended, Event, Submitted, Tick, WorkerDown, WorkerUp

_EVENTS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Submitted, Ended, WorkerUp, WorkerDown, Arrived, Tick)
}


def replay(path: Path) -> Iterator[tuple[Event, float]]:
    """The events of a journal and their times, in order."""
    with path.open("rb") as lines:
        for line in lines:
            now, kind, body = msgspec.json.decode(line)
            yield msgspec.convert(body, _EVENTS[kind], strict=False), now
