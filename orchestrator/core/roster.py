"""Which workers are up, in which life, and when they were last heard. Pure."""

from dataclasses import dataclass

from orchestrator.core.admission import disagreement
from orchestrator.core.events import Arrived, WorkerDown, WorkerUp
from protocol.messages import Hello, Role


@dataclass(slots=True)
class _Present:
    incarnation: int
    hello: Hello
    heard_at: float


class Roster:
    """At most one worker a role."""

    def __init__(self) -> None:
        self._present: dict[Role, _Present] = {}

    def __contains__(self, role: Role) -> bool:
        return role in self._present

    @property
    def roles(self) -> list[Role]:
        return list(self._present)

    @property
    def target(self) -> Hello | None:
        return self._hello("target")

    @property
    def draft(self) -> Hello | None:
        return self._hello("draft")

    @property
    def vocabulary(self) -> int:
        """The target's; 0 without a target."""
        return 0 if self.target is None else self.target.vocabulary

    def mismatch(self, hello: Hello) -> str | None:
        """Why this worker can't work with the ones that are up, as a sentence, or None."""
        partner: dict[Role, Role] = {"draft": "target", "target": "draft"}
        other = self._present.get(partner[hello.role]) if hello.role in partner else None
        return None if other is None else disagreement(hello, other.hello)

    def join(self, event: WorkerUp, now: float) -> None:
        self._present[event.hello.role] = _Present(event.incarnation, event.hello, now)

    def leave(self, event: WorkerDown) -> bool:
        """Whether this was the present worker of its role."""
        present = self._present.get(event.role)
        if present is None or present.incarnation != event.incarnation:
            return False
        del self._present[event.role]
        return True

    def hear(self, event: Arrived, now: float) -> bool:
        """Whether the message comes from the present worker of its role."""
        present = self._present.get(event.role)
        if present is None or present.incarnation != event.incarnation:
            return False
        present.heard_at = now
        return True

    def silence(self, role: Role, now: float) -> float:
        """Seconds since the present worker of a role was last heard."""
        return now - self._present[role].heard_at

    def incarnation(self, role: Role) -> int:
        return self._present[role].incarnation

    def _hello(self, role: Role) -> Hello | None:
        present = self._present.get(role)
        return None if present is None else present.hello
