"""Which workers are up, in which life, and when they were last heard. Pure."""

from dataclasses import dataclass

from orchestrator.core.admission import disagreement
from orchestrator.core.events import Arrived, WorkerDown, WorkerUp
from protocol.messages.base import Role
from protocol.messages.worker import Hello


@dataclass(slots=True)
class _Present:
    incarnation: int
    hello: Hello
    guest: bool
    heard_at: float


class WorkerRegistry:
    """At most one target and one prefill worker, and any number of drafts."""

    def __init__(self) -> None:
        self._present: dict[tuple[Role, int], _Present] = {}

    def __contains__(self, role: Role) -> bool:
        return any(present == role for present, _ in self._present)

    @property
    def target(self) -> Hello | None:
        return next((present.hello for present in self._of("target")), None)

    @property
    def chosen_draft(self) -> Hello | None:
        """The one draft there is, where the user chose it; None where one is a guest's or may be exchanged."""
        drafts = self._of("draft")
        return drafts[0].hello if len(drafts) == 1 and not drafts[0].guest else None

    @property
    def vocabulary(self) -> int:
        """The target's; 0 without a target."""
        return 0 if self.target is None else self.target.vocabulary

    def everyone(self) -> list[tuple[int, Hello, bool]]:
        """Each worker that is up: incarnation, what it said of itself, whether it is a guest's."""
        return [(one.incarnation, one.hello, one.guest) for one in self._present.values()]

    def mismatch(self, draft: Hello) -> str | None:
        """Why this draft can't work with the target that is up, as a sentence, or None."""
        return None if self.target is None else disagreement(draft, self.target)

    def mismatches(self, target: Hello) -> dict[int, str]:
        """The drafts that can't work with this target, by incarnation, each with a sentence that says why."""
        reasons = {draft.incarnation: disagreement(draft.hello, target) for draft in self._of("draft")}
        return {incarnation: reason for incarnation, reason in reasons.items() if reason is not None}

    def join(self, event: WorkerUp, now: float) -> None:
        role = event.hello.role
        if role != "draft":
            self._present = {key: present for key, present in self._present.items() if key[0] != role}
        self._present[role, event.incarnation] = _Present(event.incarnation, event.hello, event.guest, now)

    def leave(self, event: WorkerDown) -> bool:
        """Whether this worker was present."""
        return self._present.pop((event.role, event.incarnation), None) is not None

    def hear(self, event: Arrived, now: float) -> bool:
        """Whether the message comes from a present worker."""
        present = self._present.get((event.role, event.incarnation))
        if present is not None:
            present.heard_at = now
        return present is not None

    def silence(self, role: Role, now: float) -> float:
        """Seconds since the present worker of a role was last heard."""
        return now - self._of(role)[0].heard_at

    def incarnation(self, role: Role) -> int:
        return self._of(role)[0].incarnation

    def _of(self, role: Role) -> list[_Present]:
        return [present for key, present in self._present.items() if key[0] == role]
