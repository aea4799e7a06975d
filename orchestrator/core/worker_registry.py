"""Which workers are up, in which incarnation, and when each last sent a message. Pure."""

from dataclasses import dataclass

from msgspec.structs import replace

from orchestrator.core.admission import mismatch
from orchestrator.core.events import Arrived, WorkerDown, WorkerUp
from protocol.messages.base import Role
from protocol.messages.features import MAX_OUTPUTS, Output
from protocol.messages.worker import Hello


@dataclass(slots=True)
class _Worker:
    incarnation: int
    hello: Hello
    remote: bool
    last_message_at: float


class WorkerRegistry:
    """At most one target and one prefill worker, and any number of drafts."""

    def __init__(self, context: int = 0) -> None:
        """`context`: most tokens of a request; 0: what the target allows."""
        self._context = context
        self.target: Hello | None = None
        """Hello of the target that is up."""
        self.vocabulary = 0
        """Size of the target's vocabulary; 0 without a target."""
        self._workers: dict[tuple[Role, int], _Worker] = {}

    def __contains__(self, role: Role) -> bool:
        return self.target is not None if role == "target" else bool(self._of(role))

    def workers(self) -> list[tuple[int, Hello, bool]]:
        """Each worker that is up: its incarnation, its Hello, and whether it runs on another machine."""
        return [(worker.incarnation, worker.hello, worker.remote) for worker in self._workers.values()]

    def draft_mismatch(self, draft: Hello) -> str | None:
        """Why this draft can't work with the target that is up, as a sentence, or None."""
        return None if self.target is None else mismatch(draft, self.target)

    def target_mismatches(self, target: Hello) -> dict[int, str]:
        """The drafts that can't work with this target, by incarnation, each with a sentence that says why."""
        reasons = {draft.incarnation: mismatch(draft.hello, target) for draft in self._of("draft")}
        return {incarnation: reason for incarnation, reason in reasons.items() if reason is not None}

    def outputs_read(self) -> tuple[Output, ...]:
        """The outputs of the target's layers that the drafts read, ascending. Later drafts get no features where all
        together read more than a target records."""
        read: set[Output] = set()
        for draft in self._of("draft"):
            form = draft.hello.features
            if form is not None and len(read | set(form.outputs)) <= MAX_OUTPUTS:
                read |= set(form.outputs)
        return tuple(sorted(read))

    def add(self, event: WorkerUp, now: float) -> None:
        role = event.hello.role
        if role != "draft":
            self._workers = {key: worker for key, worker in self._workers.items() if key[0] != role}
        hello = self._limited(event.hello) if role == "target" else event.hello
        self._workers[role, event.incarnation] = _Worker(event.incarnation, hello, event.remote, now)
        self._note_target()

    def remove(self, event: WorkerDown) -> bool:
        """Remove a worker. Returns whether it was up."""
        removed = self._workers.pop((event.role, event.incarnation), None)
        self._note_target()
        return removed is not None

    def note_message(self, event: Arrived, now: float) -> bool:
        """Note the time of a message. Returns whether it comes from a worker that is up."""
        worker = self._workers.get((event.role, event.incarnation))
        if worker is not None:
            worker.last_message_at = now
        return worker is not None

    def silence(self, role: Role, now: float) -> float:
        """Seconds since the last message of the worker of a role."""
        return now - self._of(role)[0].last_message_at

    def incarnation(self, role: Role) -> int:
        return self._of(role)[0].incarnation

    def _limited(self, target: Hello) -> Hello:
        return replace(target, context=min(target.context, self._context or target.context))

    def _note_target(self) -> None:
        self.target = next((worker.hello for worker in self._of("target")), None)
        self.vocabulary = 0 if self.target is None else self.target.vocabulary

    def _of(self, role: Role) -> list[_Worker]:
        return [worker for key, worker in self._workers.items() if key[0] == role]
