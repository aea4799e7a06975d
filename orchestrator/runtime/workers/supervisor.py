"""Starts, watches, restarts and stops the worker processes. Knows processes; knows no tokens."""

import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import get_args

from orchestrator.core.restarts import RestartPolicy
from orchestrator.machine.device_profiles import worker_pace
from orchestrator.machine.hardware import partition_cores, worker_environment
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.runtime.workers.launch import launch, worker_command
from protocol.messages.base import Role
from protocol.worker.pacing import DevicePace
from protocol.worker.process import WorkerSetup

_GRACE = 2.0
"""Seconds between a request to end and the next stronger one. A hard kill of a process with GPU
memory wired can leak that memory on macOS, so it comes last."""
_COLLECTING = 0.1
"""Seconds that an ended process has to be collected; everything else waits meanwhile."""


@dataclass(slots=True)
class Child:
    """A running worker. `life` is our end of a socket pair: it reads end-of-file when the worker is gone."""

    role: Role
    incarnation: int
    process: subprocess.Popen[bytes]
    life: socket.socket
    log: str


@dataclass(slots=True)
class _Leaving:
    """A process that was asked to end, and when it is made to."""

    process: subprocess.Popen[bytes]
    kill_at: float


@dataclass(frozen=True, slots=True)
class Death:
    """A worker ended without having been asked to."""

    role: Role
    incarnation: int
    text: str


class Supervisor:
    """At most one worker a role. Restarts follow `RestartPolicy`; `given_up` says what was not restarted."""

    def __init__(
        self,
        setup: OrchestratorSetup,
        session: Session,
        epoch: int,
        cores: Mapping[Role, tuple[int, ...]] | None = None,
    ) -> None:
        """`cores`: processor cores for each worker, none for all of them; None for the usual shares."""
        self._setup = setup
        self._session = session
        self._epoch = epoch
        self._cores = _shares(setup) if cores is None else cores
        self._incarnations = 0
        self._policies: dict[Role, RestartPolicy] = {role: RestartPolicy() for role in get_args(Role)}
        self._due: dict[Role, float] = {}
        self._leaving: list[_Leaving] = []
        self.children: dict[Role, Child] = {}

    def start(self, role: Role) -> Child:
        """Start a new life of a role's worker."""
        incarnation = self.next_incarnation()
        log = f"{role}-{incarnation}"
        process, life = launch(
            self._command(role), self._worker_setup(role), self._session.log(log), self._environment(role)
        )
        self.children[role] = Child(role, incarnation, process, life, log)
        return self.children[role]

    def next_incarnation(self) -> int:
        """A number that no worker's life had before."""
        self._incarnations += 1
        return self._incarnations

    def bury(self, role: Role, now: float) -> Death:
        """The worker's life socket ended: collect it and plan its next start. `given_up(role)` if there is none."""
        child = self.children.pop(role)
        child.life.close()
        try:
            cause = _cause(child.process.wait(_COLLECTING))
            _end_family(child.process)
        except subprocess.TimeoutExpired:
            self._urge(child.process)
            cause = "let go of its connection to its parent and was told to end"
        delay = self._policies[role].died(now)
        if delay is not None:
            self._due[role] = now + delay
        return Death(role, child.incarnation, f"{cause}. Its last words: {self._last_words(child)}")

    def restarting(self, role: Role) -> bool:
        return role in self._due

    def forget(self, role: Role) -> None:
        """Do not start this role again."""
        self._due.pop(role, None)

    def deadline(self) -> float | None:
        """When the next restart or the end of somebody's grace is due."""
        return min([*self._due.values(), *(leaving.kill_at for leaving in self._leaving)], default=None)

    def restart_due(self, now: float) -> list[Child]:
        """Start what is due; returns the new children. Whose grace is over is killed."""
        self._insist(now)
        due: list[Role] = [role for role, at in self._due.items() if at <= now]
        for role in due:
            del self._due[role]
        return [self.start(role) for role in due]

    def kill(self, role: Role) -> None:
        """End a worker that answers no more, after a grace period by force; its death is noticed like any other."""
        child = self.children.get(role)
        if child is not None and all(child.process is not leaving.process for leaving in self._leaving):
            self._urge(child.process)

    def stop(self, told: Collection[int]) -> None:
        """End all workers: the incarnations that were told to get a grace period before SIGTERM, then comes SIGKILL."""
        for child in self.children.values():
            if child.incarnation not in told:
                child.process.terminate()
        for urges in ((), (signal.SIGTERM, signal.SIGCONT), (signal.SIGKILL,)):
            for child in self.children.values():
                for urge in urges:
                    with suppress(ProcessLookupError):
                        child.process.send_signal(urge)
            if self._all_ended(time.monotonic() + _GRACE):
                break
        for child in self.children.values():
            _end_family(child.process)
            child.life.close()
        self.children.clear()
        self._insist(math.inf)

    def _urge(self, process: subprocess.Popen[bytes]) -> None:
        """Ask a process to end, also one that is stopped."""
        for urge in (signal.SIGTERM, signal.SIGCONT):
            process.send_signal(urge)
        self._leaving.append(_Leaving(process, time.monotonic() + _GRACE))

    def _insist(self, now: float) -> None:
        """Kill whose grace is over, and forget who has gone, after ending what it had started."""
        for leaving in self._leaving:
            if leaving.kill_at <= now or leaving.process.poll() is not None:
                _end_family(leaving.process)
                leaving.kill_at = now + _GRACE
        self._leaving = [leaving for leaving in self._leaving if leaving.process.poll() is None]

    def _all_ended(self, until: float) -> bool:
        for child in self.children.values():
            try:
                child.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True

    def _command(self, role: Role) -> tuple[str, ...]:
        own = self._setup.draft_command if role == "draft" else ()
        return own or worker_command(role)

    def _worker_setup(self, role: Role) -> WorkerSetup:
        return WorkerSetup(
            address=self._session.worker_address,
            epoch=self._epoch,
            incarnation=self._incarnations,
            engine=self._engine(role),
            model=self._model(role),
            source=self._setup.target if role == "prefill" else "",
            cores=self._cores_of(role),
            prefill_chunk=self._setup.prefill_chunk,
            pace=self._pace(role),
            hosts=self._setup.target_hosts if role == "target" else None,
            owner=os.getpid() if self._setup.options.arena_memory else None,
            prefix_cache=self._setup.options.prefix_cache_memory if self._setup.options.arena_memory else 0,
            trace=self._setup.trace,
        )

    def _engine(self, role: Role) -> str:
        engines = {"draft": self._setup.draft_engine, "prefill": self._setup.prefill_engine}
        return engines.get(role, "mlx")

    def _model(self, role: Role) -> str:
        folders = {"draft": self._setup.draft, "prefill": self._setup.prefill}
        return folders.get(role, "") or self._setup.target

    def _cores_of(self, role: Role) -> tuple[int, ...]:
        """A prefill worker shares the draft's: while a prompt is read there is little to draft."""
        return self._cores.get("draft" if role == "prefill" else role, ())

    def _pace(self, role: Role) -> DevicePace | None:
        setup = self._setup
        return setup.pace and worker_pace(
            setup.pace, role, setup.options.strategy, setup.draft_engine, apart=setup.draft_link is not None
        )

    def _environment(self, role: Role) -> Mapping[str, str]:
        return worker_environment(role, self._cores_of(role))

    def _last_words(self, child: Child) -> str:
        return self._session.last_words(child.log) or "none."


def _shares(setup: OrchestratorSetup) -> Mapping[Role, tuple[int, ...]]:
    """Ranks on one core would wait a time slice for one another in each collective: they may go where they like."""
    hosts = setup.target_hosts
    return {} if hosts is not None and hosts.local else partition_cores()


def _end_family(process: subprocess.Popen[bytes]) -> None:
    """End a worker and what it had started, too: a process of its that was stopped does not see that it is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _cause(code: int) -> str:
    return f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
