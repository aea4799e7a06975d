"""Which workers are up, in which life, and when each was last heard. Pure."""

from dataclasses import dataclass

from orchestrator.core.admission import mismatch
from orchestrator.core.events import Arrived, WorkerDown, WorkerUp
from protocol.messages.base import Role
from protocol.messages.worker import Hello


@dataclass(slots=True)
class _Worker:
    incarnation: int
    hello: Hello
    guest: bool
    heard_at: float


class WorkerRegistry:
    """At most one target and one prefill worker, and any number of drafts."""

    def __init__(self) -> None:
        self._workers: dict[tuple[Role, int], _Worker] = {}

    def __contains__(self, role: Role) -> bool:
        return any(present == role for present, _ in self._workers)

    @property
    def target(self) -> Hello | None:
        return next((worker.hello for worker in self._of("target")), None)

    @property
    def chosen_draft(self) -> Hello | None:
        """The only draft, if the user chose it; None if it runs on another machine or there are several."""
        drafts = self._of("draft")
        return drafts[0].hello if len(drafts) == 1 and not drafts[0].guest else None

    @property
    def vocabulary(self) -> int:
        """The target's; 0 without a target."""
        return 0 if self.target is None else self.target.vocabulary

    def everyone(self) -> list[tuple[int, Hello, bool]]:
        """Each worker that is up: its incarnation, its Hello, and whether it runs on another machine."""
        return [(worker.incarnation, worker.hello, worker.guest) for worker in self._workers.values()]

    def draft_mismatch(self, draft: Hello) -> str | None:
        """Why this draft can't work with the target that is up, as a sentence, or None."""
        return None if self.target is None else mismatch(draft, self.target)

    def target_mismatches(self, target: Hello) -> dict[int, str]:
        """The drafts that can't work with this target, by incarnation, each with a sentence that says why."""
        reasons = {draft.incarnation: mismatch(draft.hello, target) for draft in self._of("draft")}
        return {incarnation: reason for incarnation, reason in reasons.items() if reason is not None}

    def add(self, event: WorkerUp, now: float) -> None:
        role = event.hello.role
        if role != "draft":
            self._workers = {key: worker for key, worker in self._workers.items() if key[0] != role}
        self._workers[role, event.incarnation] = _Worker(event.incarnation, event.hello, event.guest, now)

    def remove(self, event: WorkerDown) -> bool:
        """Whether this worker was up."""
        return self._workers.pop((event.role, event.incarnation), None) is not None

    def heard(self, event: Arrived, now: float) -> bool:
        """Whether the message comes from a worker that is up."""
        worker = self._workers.get((event.role, event.incarnation))
        if worker is not None:
            worker.heard_at = now
        return worker is not None

    def silence(self, role: Role, now: float) -> float:
        """Seconds since the worker of a role was last heard."""
        return now - self._of(role)[0].heard_at

    def incarnation(self, role: Role) -> int:
        return self._of(role)[0].incarnation

    def _of(self, role: Role) -> list[_Worker]:
        return [worker for key, worker in self._workers.items() if key[0] == role]
