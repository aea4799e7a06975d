"""What the workers of a recorded pipeline said."""

from pathlib import Path
from typing import TypeVar

from orchestrator.core.events import Arrived
from orchestrator.runtime.recording import replay

Kind = TypeVar("Kind")


def of_draft(journal: Path, kind: type[Kind]) -> list[Kind]:
    """The draft's messages of a kind so far, in order."""
    events = [event for event, _ in replay(journal)]
    said = [event.message for event in events if isinstance(event, Arrived) and event.role == "draft"]
    return [message for message in said if isinstance(message, kind)]
