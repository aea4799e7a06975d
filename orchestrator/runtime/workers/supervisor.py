"""Starts, restarts and stops the worker processes. Knows no messages."""

import math
import os
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from orchestrator.machine.hardware import worker_environment
from orchestrator.machine.placement import shared_device, worker_cores
from orchestrator.machine.profiles.device_profiles import worker_pace
from orchestrator.runtime.memory_plan import loaded_drafter
from orchestrator.runtime.restarts import RestartPolicy
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup, machines, model_folders, trained_drafter
from protocol.child_process import module_command
from protocol.contracts.model_folder import UNQUANTIZED, ModelFolder
from protocol.messages.base import Role
from protocol.worker.pacing import DevicePace
from protocol.worker.process import WorkerSetup


def worker_command(role: Role) -> tuple[str, ...]:
    """The command line of our own worker of this role."""
    module = "draft_worker.prefill" if role == "prefill" else f"{role}_worker"
    return module_command(module)


def launch(
    command: Sequence[str], setup: WorkerSetup, log: Path, environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process and our end of a socket pair. The end reads end of file when the worker ends, and vice versa."""
    ours, theirs = socket.socketpair()
    complete = msgspec.structs.replace(setup, life=theirs.fileno())
    with theirs, log.open("wb") as output:
        process = subprocess.Popen(
            [*command, msgspec.json.encode(complete).decode()],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    return process, ours


def gpu_shares(weights: Mapping[Role, int]) -> dict[Role, float]:
    """The share of each process, from the bytes of its weights. The shares sum to 1."""
    total = sum(weights.values())
    return {role: size / total for role, size in weights.items() if size}


def weights_on_gpu(setup: OrchestratorSetup) -> dict[Role, int]:
    """Bytes of the weights that MLX would hold for each local worker; no entry for a worker without any."""
    found: dict[Role, int] = {role: ModelFolder(folder).size for role, folder in model_folders(setup).items()}
    if drafter := trained_drafter(setup):
        found["draft"] = loaded_drafter(drafter, Path(setup.target), on_processor=False)
    if "target" in found:
        found["target"] //= machines(setup)
    return found


_GRACE = 2.0
"""Seconds between a request to end and the next stronger signal. SIGKILL comes last: on macOS it can leak wired GPU
memory."""
_CHUNK_GRACE = 6.0
"""In place of the first one, where what is read of prompts is kept on disk: a chunk has to end before it can be."""
_WAIT_SECONDS = 0.1
"""How long the exit code of an ended process is awaited, which blocks the main loop."""


_OWN_DEVICE = frozenset({"coreml"})
"""Draft engines that do not compute on MLX's device."""
Seat: TypeAlias = Role | Literal["second draft"]
"""The place of a local worker. The second draft runs another engine beside the draft's, or after it."""


@dataclass(slots=True)
class Child:
    """A running worker. `life` is our end of a socket pair: it reads end of file when the worker ends."""

    seat: Seat
    role: Role
    incarnation: int
    process: subprocess.Popen[bytes]
    life: socket.socket
    log: str
    retired: bool = False
    """It was told to end, since it is no longer needed."""
    succeeded: bool = False
    """Another worker takes its seat as soon as it has ended."""


@dataclass(slots=True)
class _Ending:
    """A process that was sent SIGTERM, and when it gets SIGKILL."""

    process: subprocess.Popen[bytes]
    kill_at: float


class Supervisor:
    """Holds at most one worker for each seat. Restarts follow `RestartPolicy`."""

    def __init__(
        self,
        setup: OrchestratorSetup,
        session: Session,
        epoch: int,
        cores: Mapping[Role, tuple[int, ...]] | None = None,
    ) -> None:
        """`cores`: processor cores of each worker, an empty tuple for all; None for the default partition."""
        self._setup = setup
        self._session = session
        self._epoch = epoch
        self._cores = self._first_cores() if cores is None else cores
        self._gpu_shares = gpu_shares(weights_on_gpu(setup))
        self._incarnations = 0
        self._policies: defaultdict[Seat, RestartPolicy] = defaultdict(RestartPolicy)
        self._due: dict[Seat, float] = {}
        self._ending: list[_Ending] = []
        self.children: dict[Seat, Child] = {}

    def start(self, seat: Seat) -> Child:
        """Start a worker with a new incarnation."""
        incarnation = self.next_incarnation()
        role = _role(seat)
        log = f"{role}-{incarnation}"
        process, life = launch(
            self._command(seat),
            self._worker_setup(seat),
            self._session.log(log),
            worker_environment(role, self._cores_of(role)),
        )
        self.children[seat] = Child(seat, role, incarnation, process, life, log)
        return self.children[seat]

    def shared_device(self, seat: Seat) -> bool:
        """Whether the draft of this seat begins on the target's device."""
        setup = self._setup
        own_device = self._engine(seat) in _OWN_DEVICE or bool(setup.draft_command)
        return shared_device(setup.options, own_device, paced=setup.pace is not None)

    def place(self, shared_device: bool) -> dict[int, tuple[int, ...]]:
        """Workers compute on one device or apart from now on. Returns the cores of those whose cores change."""
        if not self._cores:
            return {}
        before, self._cores = self._cores, worker_cores(shared_device)
        changed = {} if self._cores == before else self.children
        return {child.incarnation: self._cores_of(child.role) for child in changed.values()}

    def next_incarnation(self) -> int:
        """A number that no worker had before."""
        self._incarnations += 1
        return self._incarnations

    def reap(self, seat: Seat, now: float) -> str:
        """Wait for a worker whose life socket has ended, and schedule its restart unless it died too often. The cause,
        as a sentence without its subject."""
        child = self.children.pop(seat)
        child.life.close()
        try:
            cause = _cause(child.process.wait(_WAIT_SECONDS))
            _kill_group(child.process)
        except subprocess.TimeoutExpired:
            self._terminate(child.process)
            cause = "closed its connection to its parent and was told to end"
        at_once = 0.0 if child.succeeded else None
        delay = at_once if child.retired else self._policies[seat].died(now)
        if delay is not None:
            self._due[seat] = now + delay
        words = self._session.last_words(child.log)
        return f"{cause}. Its last words: {words}" if words else f"{cause}."

    def restarting(self, seat: Seat) -> bool:
        return seat in self._due

    def pardon(self, seat: Seat, now: float) -> None:
        """The deaths of this seat's workers until now don't count. If the last one was one too many, a restart follows
        all the same."""
        if self._policies[seat].pardon():
            self._due[seat] = now

    def forget(self, seat: Seat) -> None:
        """Cancel the scheduled restart of a seat's worker."""
        self._due.pop(seat, None)

    def retire(self, seat: Seat) -> None:
        """End a worker that is no longer needed. `reap` follows."""
        self.forget(seat)
        if seat in self.children:
            self.children[seat].retired = True
            self.kill(seat)

    def deadline(self) -> float | None:
        """When the next restart or SIGKILL is due."""
        return min([*self._due.values(), *(ending.kill_at for ending in self._ending)], default=None)

    def restart_due(self, now: float) -> list[Child]:
        """Restart the workers that are due and return them; kill processes whose grace is over."""
        self._kill_overdue(now)
        due: list[Seat] = [seat for seat, at in self._due.items() if at <= now]
        for seat in due:
            del self._due[seat]
        return [self.start(seat) for seat in due]

    def kill(self, seat: Seat) -> None:
        """End a worker that does not answer: SIGTERM, and SIGKILL after a grace period. `reap` follows."""
        child = self.children.get(seat)
        if child is not None and all(child.process is not ending.process for ending in self._ending):
            self._terminate(child.process)

    def stop(self, notified: Collection[int]) -> None:
        """End all workers: SIGTERM, then SIGKILL. `notified` incarnations got a Shutdown, and a grace period."""
        for child in self.children.values():
            if child.incarnation not in notified:
                child.process.terminate()
        first = _CHUNK_GRACE if notified and self._setup.options.disk_cache else _GRACE
        stages = ((first, ()), (_GRACE, (signal.SIGTERM, signal.SIGCONT)), (_GRACE, (signal.SIGKILL,)))
        for grace, signals in stages:
            for child in self.children.values():
                for number in signals:
                    with suppress(ProcessLookupError):
                        child.process.send_signal(number)
            if self._all_ended(time.monotonic() + grace):
                break
        for child in self.children.values():
            _kill_group(child.process)
            child.life.close()
        self.children.clear()
        self._kill_overdue(math.inf)

    def _terminate(self, process: subprocess.Popen[bytes]) -> None:
        """Send SIGTERM, and SIGCONT so that a stopped process receives it."""
        for number in (signal.SIGTERM, signal.SIGCONT):
            process.send_signal(number)
        self._ending.append(_Ending(process, time.monotonic() + _GRACE))

    def _kill_overdue(self, now: float) -> None:
        """Kill processes whose grace is over, and the children of those that have ended."""
        for ending in self._ending:
            if ending.kill_at <= now or ending.process.poll() is not None:
                _kill_group(ending.process)
                ending.kill_at = now + _GRACE
        self._ending = [ending for ending in self._ending if ending.process.poll() is None]

    def _all_ended(self, until: float) -> bool:
        for child in self.children.values():
            try:
                child.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True

    def _command(self, seat: Seat) -> tuple[str, ...]:
        if seat == "second draft":
            return worker_command("draft")
        return (self._setup.draft_command if seat == "draft" else ()) or worker_command(seat)

    def _worker_setup(self, seat: Seat) -> WorkerSetup:
        role, plan = _role(seat), self._setup.kv
        return WorkerSetup(
            address=self._session.worker_address,
            epoch=self._epoch,
            incarnation=self._incarnations,
            engine=self._engine(seat),
            model=self._model(seat),
            target=self._setup.target if role == "draft" else "",
            cores=self._cores_of(role),
            prefill_chunk=self._setup.options.prefill_step_size,
            pace=self._pace(role),
            texts=self._setup.target_texts if role == "target" else "",
            hosts=self._setup.target_hosts if role == "target" else None,
            owner=os.getpid() if self._setup.options.arenas else None,
            arena_memory=self._setup.options.arenas if role == "target" else 0,
            disk_cache=self._setup.options.disk_cache_bytes if role == "target" else 0,
            kv_bits=self._setup.options.kv_bits if role != "draft" else UNQUANTIZED,
            gpu_share=self._gpu_shares.get(role, 1.0),
            prefix_cache=self._setup.options.prefix_cache if self._setup.options.keeps_kv else 0,
            kv_pool=None if plan is None else {"target": plan.target, "draft": plan.draft}.get(role),
            trace=self._setup.trace,
        )

    def _engine(self, seat: Seat) -> str:
        target = "recorded" if self._setup.target_texts else "mlx"
        engines = {"target": target, "draft": self._setup.draft_engine, "prefill": self._setup.prefill_engine}
        return self._setup.second_draft[0] if seat == "second draft" else engines[seat]

    def _model(self, seat: Seat) -> str:
        if seat == "second draft":
            return self._setup.second_draft[1]
        return (self._setup.draft if seat == "draft" else "") or self._setup.target

    def _first_cores(self) -> Mapping[Role, tuple[int, ...]]:
        """Local ranks get no cores of their own: on one core, each collective would cost a time slice."""
        hosts = self._setup.target_hosts
        return {} if hosts is not None and hosts.local else worker_cores(self.shared_device("draft"))

    def _cores_of(self, role: Role) -> tuple[int, ...]:
        """A prefill worker shares the draft's cores: during prefill there is little to draft."""
        return self._cores.get("draft" if role == "prefill" else role, ())

    def _pace(self, role: Role) -> DevicePace | None:
        setup = self._setup
        return setup.pace and worker_pace(setup.pace, role, setup.options, setup.draft_engine)


def _role(seat: Seat) -> Role:
    return "draft" if seat == "second draft" else seat


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker and its children: a stopped child would not notice that the worker has ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _cause(code: int) -> str:
    return f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
