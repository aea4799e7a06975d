"""All workers of a pipeline: its own and remote ones. Yields events of the state machine."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import zmq

from orchestrator.core.events import WorkerUp
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.runtime.workers.local import LocalWorkers, WorkerEventOrError
from orchestrator.runtime.workers.remote import RemoteWorkers
from orchestrator.runtime.workers.remote_registry import RemoteRegistry
from protocol.contracts.engines import NO_DRAFT
from protocol.messages.base import Role
from protocol.messages.remote import WorkerStatus
from protocol.messages.worker import ToWorker


class WorkerPool:
    """Local and remote workers behind one interface; each worker is identified by its incarnation."""

    def __init__(self, context: zmq.Context[Any], setup: OrchestratorSetup, epoch: int, drafts: bool) -> None:
        """`drafts`: whether the strategy uses a draft."""
        self._setup = setup
        self._drafts = drafts
        self._local = LocalWorkers(context, setup, epoch)
        self.trace = self._local.trace
        self._remote: RemoteWorkers | None = None
        if setup.listening is not None:
            self._refusals = self._initial_refusals()
            registry = RemoteRegistry(self._local.supervisor.next_incarnation, self._refusals)
            self._remote = RemoteWorkers(context, setup, epoch, registry, self._local.entries)

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of the local workers."""
        wanted: dict[Role, bool] = {
            "target": self._setup.target_engine != "none",
            "draft": self._setup.draft_engine != NO_DRAFT and self._drafts,
            "prefill": self._setup.prefill_engine not in ("none", "guest"),
        }
        return tuple(role for role in wanted if wanted[role])

    def start(self, poller: zmq.Poller) -> None:
        """Start the local workers, and register all sockets in `poller`."""
        self._local.start(self.roles, poller)
        for socket in [] if self._remote is None else self._remote.sockets:
            poller.register(socket, zmq.POLLIN)

    def receive(self, ready: Iterable[Any]) -> Iterator[WorkerEventOrError]:
        """Events from messages and from the ends of workers; `ready` are the sockets that the poller reports."""
        if self._remote is None:
            return self._local.receive(ready)
        return chain(self._admitting_prefill(self._remote, self._local.receive(ready)), self._remote.receive())

    @property
    def local(self) -> LocalWorkers:
        """The pipeline's own workers."""
        return self._local

    def settled(self) -> None:
        """The pipeline is ready: from now on a failing worker is not the user's mistake."""
        self._local.settled = True

    def send(self, incarnation: int, message: ToWorker) -> None:
        """Send to a worker, if it is up."""
        if self._remote is not None and self._remote.has(incarnation):
            self._remote.send(incarnation, message)
        else:
            self._local.send(incarnation, message)

    def ping(self, statuses: Mapping[int, WorkerStatus]) -> None:
        """Send a Ping to all workers; `statuses` are those of the drafts."""
        self._local.ping()
        if self._remote is not None:
            self._remote.ping(statuses)

    def handle_due(self, now: float) -> Iterator[WorkerEventOrError]:
        """Restart local workers and give up remote ones, where that is due."""
        self._local.restart_due(now)
        if self._remote is not None:
            yield from self._remote.give_up_due()

    def deadline(self) -> float | None:
        due = [self._local.deadline(), None if self._remote is None else self._remote.deadline()]
        return min((at for at in due if at is not None), default=None)

    def timeout(self, wait: float) -> float:
        return self._local.timeout(wait)

    def replace(self, role: Role, incarnation: int, reason: str) -> Iterator[WorkerEventOrError]:
        """End a worker that does not answer."""
        if self._remote is not None and self._remote.has(incarnation):
            yield from self._remote.give_up(incarnation, reason)
        else:
            self._local.supervisor.kill(role)

    def dismiss(self, role: Role, incarnation: int, text: str) -> Iterator[WorkerEventOrError]:
        """End a worker that can't serve this pipeline: a remote one is sent the reason, a local one is an error."""
        if self._remote is not None and self._remote.has(incarnation):
            self._remote.dismiss(incarnation, text)
        else:
            yield from self._local.dismiss(incarnation, text)

    def stop(self) -> None:
        if self._remote is not None:
            self._remote.close()
        self._local.stop()

    def _admitting_prefill(
        self, remote: RemoteWorkers, local: Iterable[WorkerEventOrError]
    ) -> Iterator[WorkerEventOrError]:
        """The local events. Remote prefill workers are admitted once the target has announced its KV format."""
        for event in local:
            if isinstance(event, WorkerUp) and event.hello.role == "target":
                remote.intake.set_target(event.hello)
                if self._setup.prefill_engine == "guest":
                    self._refusals.pop("prefill", None)
            yield event

    def _initial_refusals(self) -> dict[Role, str]:
        """Roles that remote workers may not have, with the reasons."""
        refusals: dict[Role, str] = {
            "prefill": "The target of this pipeline is still being loaded."
            if self._setup.prefill_engine == "guest"
            else "This pipeline takes no prefill worker, which could change its text: "
            "its owner has to start it with prefill engine guest.",
        }
        if self._setup.target_engine != "none":
            refusals["target"] = "This pipeline has its own target: its owner has to start it with target engine none."
        if not self._drafts:
            refusals["draft"] = f"This pipeline runs the strategy {self._setup.options.strategy}, which uses no draft."
        return refusals
