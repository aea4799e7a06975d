"""Carries a drafter's matrix from the draft to the target that asks for it, block by block. Knows no sockets."""

from dataclasses import dataclass

from orchestrator.core.events import Arrived, WorkerUp
from protocol.messages.features import ProjectionShipment, ProjectionWanted


@dataclass(frozen=True, slots=True)
class ProjectionArrived:
    """A draft has sent rows of its matrix."""

    incarnation: int
    shipment: ProjectionShipment


class ProjectionRelay:
    """Who has which matrix, and which target is up."""

    def __init__(self) -> None:
        self._target: int | None = None
        self._drafts: dict[int, int] = {}
        """Of the last draft with each key, its incarnation."""

    def note(self, event: WorkerUp) -> None:
        """A worker has come."""
        form = event.hello.features
        if event.hello.role == "target":
            self._target = event.incarnation
        elif event.hello.role == "draft" and form is not None and form.projection is not None:
            self._drafts[form.projection.key] = event.incarnation

    def wanted(self, event: Arrived) -> int | None:
        """The draft that the target asks, by incarnation; None if there is none."""
        wanted = event.message
        if not isinstance(wanted, ProjectionWanted) or event.incarnation != self._target:
            return None
        return self._drafts.get(wanted.key)

    def carried(self, event: ProjectionArrived) -> int | None:
        """The target that rows of a matrix go to, by incarnation; None if they are not their sender's."""
        return self._target if self._drafts.get(event.shipment.block.key) == event.incarnation else None
