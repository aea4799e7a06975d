"""A worker of this machine for a pipeline on another machine: joins, attaches, runs the worker, reconnects.

The thin shell of `launch-pipeline attach`; the worker itself is the same as in a pipeline of one machine.
"""

import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from orchestrator.api.client import STAMP
from orchestrator.machine.hardware import usable_cores, worker_environment
from orchestrator.machine.servers import KnownServer, remember
from orchestrator.runtime.restarts import RestartPolicy
from orchestrator.runtime.session import Session
from orchestrator.runtime.workers.supervisor import launch, worker_command
from protocol.errors import InputError, PipelineError, blaming
from protocol.messages.base import Role, plain
from protocol.messages.client import Refused
from protocol.messages.remote import Attach, Join, Joined, Leave, StatusUpdate, ToRemote, Welcome
from protocol.security.keys import JoinLine, KeyPair, own_keys
from protocol.transport import Link
from protocol.worker.process import WorkerSetup

_POLL_SECONDS = 0.2
_TERMINATION_SECONDS = 2.0
_EXPLANATION_SECONDS = 1.0
"""For the server to send the reason why a worker had to end."""
_SERVER_SILENCE = 10.0
_RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0)
"""Between attempts at a server that refuses temporarily."""


@dataclass(frozen=True, slots=True)
class Lending:
    """The worker that is lent, and the server."""

    role: Role
    server: KnownServer
    name: str
    """The name of this machine that is proposed to the server."""
    folder: Path
    """Folder of this machine's keys."""
    worker: WorkerSetup
    """Without the stamp. Its prefix cache is used if the server lets workers keep KV of ended requests."""
    line: JoinLine | None = None
    """For a server that this machine has not joined yet."""


def lent_worker(server: KnownServer, folder: Path, engine: str, model: str, **others: Any) -> WorkerSetup:
    """The setup of a worker for this server; `folder`: of this machine's keys."""
    return WorkerSetup(
        address=server.address,
        epoch=0,
        incarnation=0,
        server=server.public.decode(),
        keys=str(folder),
        patience=_SERVER_SILENCE,
        engine=engine,
        model=model,
        **others,
    )


class _TemporaryRefusal(Exception):
    """The server refused or released the worker; it may accept one later."""


@dataclass(slots=True)
class _Worker:
    """The child process, and the stamp that it has."""

    life: int
    stamp: tuple[int, int]
    process: subprocess.Popen[bytes]
    pipe: socket.socket
    worked: bool = False
    """It has loaded its model."""


class Attachment:
    """Runs until Ctrl-C. Raises PipelineError for a failure that a retry can't fix."""

    def __init__(self, lending: Lending, show: Callable[[str], None], note: Callable[[str], None]) -> None:
        """`show` is called with the status line whenever it changes, `note` with a sentence that stays."""
        self._lending = lending
        self._keys = own_keys(lending.folder)
        self._show = show
        self._note = note
        self._joined = False
        """In this life of the program; what is said of a used join line is said once."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._session = Session.create()
        self._policy = RestartPolicy()

    def run(self) -> None:
        refused = 0
        try:
            while True:
                try:
                    self._one_life()
                    refused = 0
                except _TemporaryRefusal as reason:
                    wait = _RETRY_SECONDS[min(refused, len(_RETRY_SECONDS) - 1)]
                    refused += 1
                    self._show(f"{reason} Trying again in {wait:.0f} s.")
                    time.sleep(wait)
        finally:
            self._context.term()
            self._session.remove()

    def _one_life(self) -> None:
        """Attach and work until the worker ends."""
        control = self._connect(self._keys)
        life = secrets.randbelow(1 << 53)
        worker: _Worker | None = None
        try:
            welcome = self._attach(control, life)
            if welcome is None:
                self._join()
                return
            if self._lending.line is not None and not self._joined:
                self._note(
                    f"This machine has joined {self._where} already: {self._where} is enough in place of the line."
                )
            self._joined = True
            remember(self._lending.folder, self._lending.server)
            worker = self._launch(welcome)
            self._watch(control, worker)
        finally:
            # Sending to a server that denies the connection would block for ever.
            if control.state == "up":
                control.send(Leave(life))
            if worker is not None:
                _end(worker)
            control.close()

    def _attach(self, control: Link, life: int) -> Welcome | None:
        """The stamp for one life; None if the server does not know this machine and there is a join line."""
        control.send(Attach(self._lending.role, life))
        began = time.monotonic()
        while True:
            for message in control.receive(_POLL_SECONDS):
                if isinstance(message, Welcome) and message.life == life:
                    return message
                raise_refusal(message)
            match control.state:
                case "denied" if self._lending.line is not None:
                    return None
                case "denied":
                    raise InputError(
                        f"{self._where} does not let this machine in (it was sent away, or never joined): "
                        "ask for a new join line (`launch-pipeline workers invite` there)."
                    )
                case "wrong server":
                    raise self._mistaken()
                case state:
                    waited = time.monotonic() - began
                    self._show(f"{_WAITING[state]} {self._where} ({waited:.0f} s) ...")
            if control.reconnected():
                control.send(Attach(self._lending.role, life))

    def _join(self) -> None:
        """Register this machine's own key with the one-time keys of the join line."""
        line = self._lending.line
        assert line is not None
        joining = self._connect(line.one_time_keys())
        try:
            joining.send(Join(self._lending.name, self._keys.public.decode()))
            while True:
                for message in joining.receive(_POLL_SECONDS):
                    if isinstance(message, Joined):
                        self._joined = True
                        self._show(f"Joined {self._where} as {message.name}.")
                        return
                    raise_refusal(message)
                if joining.state == "denied":
                    raise InputError(
                        "This join line was used or is older than ten minutes: ask for a new one "
                        "(`launch-pipeline workers invite` there)."
                    )
                if joining.state == "wrong server":
                    raise self._mistaken()
                if joining.reconnected():
                    joining.send(Join(self._lending.name, self._keys.public.decode()))
        finally:
            joining.close()

    def _watch(self, control: Link, worker: _Worker) -> None:
        """Until the worker has ended or the server has given it up."""
        was_up = True
        while worker.process.poll() is None:
            for message in control.receive(_POLL_SECONDS):
                if isinstance(message, StatusUpdate) and message.life == worker.life:
                    worker.worked = worker.worked or message.status != "loading"
                    self._show(self._line(message))
                    if message.status == "loading" and control.state == "up":
                        # The worker itself says nothing while it loads.
                        control.send(Attach(self._lending.role, worker.life))
                elif isinstance(message, Welcome) and (message.epoch, message.incarnation) != worker.stamp:
                    # After a long interruption the server has given the worker up.
                    return
                else:
                    raise_refusal(message)
            up = control.state == "up"
            if control.reconnected():
                control.send(Attach(self._lending.role, worker.life))
            elif was_up and not up:
                self._show(f"The connection to {self._where} is lost; trying again ...")
            was_up = up
        for message in control.receive(_EXPLANATION_SECONDS):
            if isinstance(message, Refused) and not worker.worked:
                raise blaming(message.blame, plain(message.text))
            if isinstance(message, Refused):
                raise_refusal(message)
        self._after(worker)

    def _after(self, worker: _Worker) -> None:
        code = worker.process.returncode
        if code == 0:
            raise _TemporaryRefusal(f"{self._where} has released the {self._lending.role}.")
        words = self._session.last_words(self._lending.role) or "none"
        delay = self._policy.died(time.monotonic())
        if delay is None:
            raise PipelineError(
                f"The {self._lending.role} worker died three times within a minute (exit code {code}). "
                f"Its last words: {words}. Run `launch-pipeline doctor`, or choose another model."
            )
        time.sleep(delay)

    def _launch(self, welcome: Welcome) -> _Worker:
        lending = self._lending
        cache = lending.worker.prefix_cache if welcome.keeps_kv else 0
        stamp = {"epoch": welcome.epoch, "incarnation": welcome.incarnation}
        setup = msgspec.structs.replace(lending.worker, **stamp, prefix_cache=cache)
        environment = worker_environment(lending.role, usable_cores())
        log = self._session.log(lending.role)
        process, pipe = launch(worker_command(lending.role), setup, log, environment)
        self._show(f"Loading {setup.model or setup.engine} ...")
        return _Worker(welcome.life, (welcome.epoch, welcome.incarnation), process, pipe)

    def _connect(self, keys: KeyPair) -> Link:
        server = self._lending.server
        return Link(self._context, server.address, STAMP, ToRemote, server=server.public, keys=keys)

    @property
    def _where(self) -> str:
        return self._lending.server.address.removeprefix("tcp://")

    def _line(self, state: StatusUpdate) -> str:
        away = "" if state.round_trip is None else f" · round trip {state.round_trip * 1000:.1f} ms"
        return f"{self._lending.role} for {self._where} · {state.status}{away}"

    def _mistaken(self) -> InputError:
        return InputError(
            f"What answers at {self._where} is not the server that the join line named: check the address, "
            "or ask for a new join line."
        )


_WAITING = {
    "connecting": "Looking for",
    "up": "Waiting for an answer from",
    "down": "Lost the connection to",
}


def raise_refusal(message: Any) -> None:
    """A refusal that blames this machine's input is an InputError; any other one is temporary."""
    if isinstance(message, Refused):
        # `plain` removes control characters: the text comes from another machine.
        if message.blame == "input":
            raise InputError(plain(message.text))
        raise _TemporaryRefusal(plain(message.text))


def _end(worker: _Worker) -> None:
    """SIGTERM, then SIGKILL."""
    for urge in (signal.SIGTERM, signal.SIGKILL):
        if worker.process.poll() is None:
            worker.process.send_signal(urge)
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(_TERMINATION_SECONDS)
    worker.pipe.close()
