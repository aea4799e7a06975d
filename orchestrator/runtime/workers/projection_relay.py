"""Carries a drafter's matrix from the draft to the target that asks for it, block by block. Knows no sockets."""

from dataclasses import dataclass

from orchestrator.core.events import Arrived, WorkerUp
from orchestrator.core.workers import MAX_DRAFTS
from protocol.messages.features import ProjectionShipment, ProjectionWanted


@dataclass(frozen=True, slots=True)
class ProjectionArrived:
    """A draft has sent rows of its matrix."""

    incarnation: int
    shipment: ProjectionShipment


class ProjectionRelay:
    """Who has which matrix, which target is up, and what it has asked for."""

    def __init__(self) -> None:
        self._target: int | None = None
        self._drafts: dict[int, int] = {}
        """Of the last draft with each key, its incarnation; of the latest keys."""
        self._asked: ProjectionWanted | None = None

    def note(self, event: WorkerUp) -> None:
        """A worker has come."""
        form = event.hello.features
        if event.hello.role == "target":
            self._target = event.incarnation
        elif event.hello.role == "draft" and form is not None and form.projection is not None:
            self._drafts.pop(form.projection.key, None)
            self._drafts[form.projection.key] = event.incarnation
            for key in list(self._drafts)[:-MAX_DRAFTS]:
                del self._drafts[key]

    def wanted(self, event: Arrived) -> int | None:
        """The draft that the target asks, by incarnation; None if there is none."""
        wanted = event.message
        if not isinstance(wanted, ProjectionWanted) or event.incarnation != self._target:
            return None
        self._asked = wanted
        return self._drafts.get(wanted.key)

    def carried(self, event: ProjectionArrived) -> int | None:
        """The target that rows of a matrix go to, by incarnation; None if they are not their sender's, or if nobody has
        asked for them."""
        block = event.shipment.block
        asked = self._asked == ProjectionWanted(block.key, block.first)
        if not asked or self._drafts.get(block.key) != event.incarnation:
            return None
        self._asked = None
        return self._target
