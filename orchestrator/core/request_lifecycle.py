"""The life of each request: it is submitted, gets a place, is started on the workers, and ends on all of them. Pure."""

from typing import Literal

from orchestrator.core.commands import Command, Finish, Reject, SendMessage
from orchestrator.core.drafts.pool import DraftPool
from orchestrator.core.events import Submitted
from orchestrator.core.phases import Trigger
from orchestrator.core.policy.decision import Strategy
from orchestrator.core.prefills import PrefillRouter
from orchestrator.core.scheduler import Scheduler
from orchestrator.core.sequence import Sequence
from orchestrator.core.workers import WorkerRegistry, refusal
from protocol.messages.base import SequenceId
from protocol.messages.worker import Stop


class RequestLifecycle:
    """Adds sequences to `sequences` and removes them. A place that becomes free goes to the next request at once."""

    def __init__(
        self,
        strategy: Strategy,
        sequences: dict[SequenceId, Sequence],
        workers: WorkerRegistry,
        scheduler: Scheduler,
        drafts: DraftPool,
        prefills: PrefillRouter,
        profile: str,
    ) -> None:
        """`profile`: name of the device profile that paces the workers; empty without one."""
        self._strategy = strategy
        self._sequences = sequences
        self._workers = workers
        self._scheduler = scheduler
        self._drafts = drafts
        self._prefills = prefills
        self._profile = profile

    def submit(self, event: Submitted, now: float) -> list[Command]:
        estimates = self._drafts.estimates(event.request)
        sequence = Sequence(event.sequence, event.request, estimates, self._strategy.drafts, now)
        self._sequences[sequence.id] = sequence
        return self.admit(sequence.id, now) if self._scheduler.add(sequence.id) else []

    def admit(self, id: SequenceId, now: float) -> list[Command]:
        """Start a request that got a place."""
        self._sequences[id].enter(Trigger.ADMIT)
        return self.start(self._sequences[id], now)

    def start(self, sequence: Sequence, now: float) -> list[Command]:
        """Start a sequence on the target, if one is up, and on the drafts that are in use."""
        target = self._workers.target
        if target is None:
            return []
        reason = refusal(sequence.request, target)
        if reason is not None:
            return self.reject(sequence, reason, now)
        sequence.limit_to(target)
        sequence.outstanding = None
        return [self._prefills.begin(sequence, now), *self._drafts.begin(sequence, now)]

    def stop(self, sequence: Sequence) -> list[Command]:
        """End a sequence on all workers."""
        releases = self._prefills.sequence_ended(sequence)
        stops: list[Command] = [
            SendMessage(role, Stop(sequence.id)) for role in ("target", "prefill") if role in self._workers
        ]
        return [*stops, *releases, *self._drafts.sequence_ended(sequence.id)]

    def finish(self, sequence: Sequence, reason: Literal["stop", "length", "cancelled"], now: float) -> list[Command]:
        strategy, plain = self._strategy, sequence.plain_tokens_per_second()
        statistics = sequence.stats.statistics(now, strategy.drafts, strategy.caches, self._profile, plain)
        return [*self._forget(sequence, now), Finish(sequence.id, reason, statistics)]

    def reject(self, sequence: Sequence, reason: str, now: float) -> list[Command]:
        """The target can't serve the request."""
        return [*self._forget(sequence, now), Reject(sequence.id, reason)]

    def _forget(self, sequence: Sequence, now: float) -> list[Command]:
        del self._sequences[sequence.id]
        successor = self._scheduler.remove(sequence.id)
        return [*self.stop(sequence), *([] if successor is None else self.admit(successor, now))]
