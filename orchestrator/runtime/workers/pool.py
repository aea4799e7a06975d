"""All workers of a pipeline: its own, and those of other machines. What it yields are events of the state machine."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import zmq

from orchestrator.core.events import WorkerUp
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.runtime.workers.local import LocalWorkers, WorkerNews
from orchestrator.runtime.workers.remote import RemoteWorkers
from orchestrator.runtime.workers.remote_registry import RemoteRegistry
from protocol.contracts.engines import NO_DRAFT
from protocol.errors import InputError
from protocol.messages.base import Role
from protocol.messages.remote import WorkerStatus
from protocol.messages.worker import ToWorker


class WorkerPool:
    """Each worker is known by its incarnation, wherever it is."""

    def __init__(self, context: zmq.Context[Any], setup: OrchestratorSetup, epoch: int, drafts: bool) -> None:
        """`drafts`: whether the strategy has a use for any."""
        self._setup = setup
        self._drafts = drafts
        self._local = LocalWorkers(context, setup, epoch)
        self.trace = self._local.trace
        self._remote: RemoteWorkers | None = None
        if setup.listening is not None:
            self._refused = self._refusals()
            guests = RemoteRegistry(self._local.supervisor.next_incarnation, self._refused)
            self._remote = RemoteWorkers(context, setup, epoch, guests, self._local.roll)

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of our own workers."""
        wanted: dict[Role, bool] = {
            "target": self._setup.target_engine != "none",
            "draft": self._setup.draft_engine != NO_DRAFT and self._drafts,
            "prefill": self._setup.prefill_engine not in ("none", "guest"),
        }
        return tuple(role for role, yes in wanted.items() if yes)

    def start(self, poller: zmq.Poller) -> None:
        """Start our own and let others come; all there is to wait for goes into `poller`."""
        self._local.start(self.roles, poller)
        for socket in [] if self._remote is None else self._remote.sockets:
            poller.register(socket, zmq.POLLIN)

    def receive(self, ready: Iterable[Any]) -> Iterator[WorkerNews]:
        """What workers said, and who is gone; `ready` is what the poller found."""
        if self._remote is None:
            return self._local.receive(ready)
        return chain(self._noted(self._remote, self._local.receive(ready)), self._remote.receive())

    def settled(self) -> None:
        """The pipeline is ready: from now on a worker that can't go on is no fault of what was asked for."""
        self._local.settled = True

    def send(self, incarnation: int, message: ToWorker) -> None:
        """Send to a worker, if it is up."""
        if self._remote is not None and self._remote.has(incarnation):
            self._remote.send(incarnation, message)
        else:
            self._local.send(incarnation, message)

    def ping(self, statuses: Mapping[int, WorkerStatus]) -> None:
        """Ask all for a sign of life; `statuses` are those of the drafts."""
        self._local.ping()
        if self._remote is not None:
            self._remote.ping(statuses)

    def on_time(self, now: float) -> Iterator[WorkerNews]:
        """What is due: our own are started again, others given up."""
        self._local.restart_due(now)
        if self._remote is not None:
            yield from self._remote.patrol()

    def deadline(self) -> float | None:
        due = [self._local.deadline(), None if self._remote is None else self._remote.deadline()]
        return min((at for at in due if at is not None), default=None)

    def timeout(self, wait: float) -> float:
        return self._local.timeout(wait)

    def replace(self, role: Role, incarnation: int, reason: str) -> Iterator[WorkerNews]:
        """A worker answers no more."""
        if self._remote is not None and self._remote.has(incarnation):
            yield from self._remote.give_up(incarnation, reason)
        else:
            self._local.supervisor.kill(role)

    def dismiss(self, role: Role, incarnation: int, text: str) -> Iterator[WorkerNews]:
        """A worker can't serve here. Another machine's is sent away; without one of our own nothing goes on."""
        if self._remote is not None and self._remote.has(incarnation):
            self._remote.dismiss(incarnation, text)
        else:
            self._local.supervisor.forget(role)
            yield InputError(text)

    def stop(self) -> None:
        if self._remote is not None:
            self._remote.close()
        self._local.stop()

    def _noted(self, remote: RemoteWorkers, local: Iterable[WorkerNews]) -> Iterator[WorkerNews]:
        """A prefill worker of another machine can come once our target has said what its KV is like."""
        for news in local:
            if isinstance(news, WorkerUp) and news.hello.role == "target":
                remote.intake.serve(news.hello)
                if self._setup.prefill_engine == "guest":
                    self._refused.pop("prefill", None)
            yield news

    def _refusals(self) -> dict[Role, str]:
        """Why workers of other machines may not come as what."""
        refusals: dict[Role, str] = {
            "prefill": "The target of this pipeline is still being loaded."
            if self._setup.prefill_engine == "guest"
            else "This pipeline takes no prefill worker, which could change its text: "
            "its owner has to start it with --prefill-engine guest.",
        }
        if self._setup.target_engine != "none":
            refusals["target"] = "This pipeline has a target of its own: start it with --target-engine none."
        if not self._drafts:
            refusals["draft"] = f"This pipeline runs --strategy {self._setup.options.strategy}, which uses no draft."
        return refusals
