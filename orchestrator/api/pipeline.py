"""A pipeline of this program: starts the orchestrator process, waits until it is ready, ends it."""

import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import msgspec

from orchestrator.api.client import STAMP, Client
from orchestrator.api.owner import Owner
from orchestrator.api.settings import PipelineSettings, checked_setup
from orchestrator.api.validation import warn_ineffective
from orchestrator.core.options import StrategyName
from orchestrator.machine.memory.kv_plan import kept_sentence
from orchestrator.runtime.memory_plan import PipelineMemory, memory_of
from orchestrator.runtime.notices import Notice, received, stay
from orchestrator.runtime.session import Session
from protocol.child_process import module_command
from protocol.contracts.coreml import OnProgress, silent
from protocol.errors import InputError, PipelineError, blaming
from protocol.messages.client import Inquire, PipelineState, ToClient
from protocol.security.addresses import require_local
from protocol.speculation.successors import Successors, stored_successors
from protocol.transport import Link

_CLOSING_SECONDS = 11.0
_DEFAULTS = PipelineSettings()


class OrchestratorEnded(PipelineError):
    """The orchestrator ended without a reason of its own: it was killed, or it has a fault."""

    def __init__(self, last_words: str) -> None:
        super().__init__(f"The orchestrator ended unexpectedly; start it again. Its last words: {last_words}")
        self.last_words = last_words


class Pipeline(Client):
    """`with Pipeline() as p: p.generate("def f(")`: three processes, which end with the block.

    `target` and `draft` are folders, GGUF files or Hugging Face ids (None: the default pair, fetched on first use). A
    target that no shipped draft fits decodes alone if no `draft` is given; `note` then says which drafts fit. Further
    keywords are the fields of `PipelineSettings`, or `settings` is all of them, and keywords change it.

    `address`: where clients connect on this machine; None picks one.
    `room`: bytes that it may take of this machine's memory, if other pipelines have the rest (None: all for models).
    `on_progress` is called while a model is fetched or converted, which happens once, in the constructor.
    `on_notice` is called, in a thread of its own, with what is to be told about the draft while the pipeline runs.

    Raises InputError for what can't work, PipelineError if starting fails.
    """

    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        *,
        settings: PipelineSettings = _DEFAULTS,
        address: str | None = None,
        room: int | None = None,
        on_progress: OnProgress = silent,
        on_notice: Callable[[Notice], None] | None = None,
        **keywords: Any,
    ) -> None:
        models = {"target": target, "draft": draft}
        keywords |= {name: model for name, model in models.items() if model is not None}
        asked = settings.changed(**keywords)
        warn_ineffective(asked)
        self._setup, self.note = checked_setup(asked, on_progress, room)
        self._on_notice = on_notice
        self._listener: threading.Thread | None = None
        self._session: Session | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._life: socket.socket | None = None
        if address is not None:
            require_local(address)
        self._fixed_address = address
        super().__init__(address or "")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def keeps(self) -> str:
        """How many tokens of conversations it keeps for later turns, as a sentence; empty if that was not computed."""
        return kept_sentence(self._setup.kv) if self._setup.kv is not None else ""

    def memory(self) -> PipelineMemory:
        """What it takes of this machine's memory. Raises InputError for a model that can't be read."""
        return memory_of(self._setup)

    def start(self) -> PipelineState:
        """Start the processes and wait until models are loaded. After `close` it may be started again."""
        self._session = Session.create()
        self.address = self._fixed_address or self._session.client_address
        try:
            self._spawn(self._session)
            return self._await_ready(self._session)
        except BaseException:  # also after Ctrl-C: no process of the pipeline may stay
            self.close()
            raise

    def close(self) -> None:
        """End every process of the pipeline and remove its folder. A second Ctrl-C in here ends them at once."""
        process, session = self._process, self._session
        self._process = self._session = None
        try:
            if self._life is not None:
                self._stop_listening(self._life)
                self._life.close()
                self._life = None
            if process is not None:
                _end(process)
        finally:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
            if session is not None:
                session.remove()

    def leave(self, seconds: float) -> None:
        """Close, but let the processes run on until nobody has asked the pipeline anything for so long, or another one
        begins. Commands of this user find it meanwhile."""
        process, session, life = self._process, self._session, self._life
        assert process is not None
        assert session is not None
        assert life is not None
        session.offer(self.address)
        session.inherited_by(process.pid)
        stay(life, seconds)
        self._process = self._session = self._life = None
        self._stop_listening(life)
        life.close()

    @property
    def strategy(self) -> StrategyName:
        """The strategy in force: `ar` for a pipeline that can get no draft."""
        return self._setup.options.strategy

    @property
    def successors(self) -> Successors | None:
        """The table of what the target writes, if there is one."""
        return stored_successors(self._setup.successors)

    @property
    def owner(self) -> Owner:
        """Invites, lists and revokes workers of other machines. Raises InputError if the pipeline does not listen."""
        if self._session is None or self._setup.listening is None:
            raise InputError('No worker of another machine can come: open the pipeline with listen="HOST:PORT".')
        return Owner(self._session)

    def wait(self) -> None:
        """Until the orchestrator ends; raises PipelineError saying why."""
        process, session = self._process, self._session
        assert process is not None
        assert session is not None
        process.wait()
        raise self._cause(session)

    def _spawn(self, session: Session) -> None:
        self._life, theirs = socket.socketpair()
        told = {"session": str(session.folder), "address": self.address, "life": theirs.fileno()}
        setup = msgspec.structs.replace(self._setup, **told)
        with theirs, session.log("orchestrator").open("wb") as log:
            self._process = subprocess.Popen(
                [*module_command("orchestrator"), msgspec.json.encode(setup).decode()],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

        if self._on_notice is not None:
            self._listener = threading.Thread(
                target=_pass_on, args=(self._life, self._on_notice), daemon=True, name="notices"
            )
            self._listener.start()

    def _stop_listening(self, life: socket.socket) -> None:
        """The orchestrator reads end of file too, and ends."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                life.shutdown(socket.SHUT_RDWR)
            listener.join()

    def _await_ready(self, session: Session) -> PipelineState:
        link = Link(self._context, self.address, STAMP, ToClient)
        try:
            link.send(Inquire())
            while True:
                for message in link.receive(0.1):
                    # Another pipeline may have the address that ours is about to be refused.
                    if not isinstance(message, PipelineState) or message.session != str(session.folder):
                        continue
                    if message.failure is not None:
                        raise blaming(message.blame, message.failure)
                    if message.ready:
                        return message
                self._check(0.0)
        finally:
            link.close()

    def _link(self) -> Link:
        if not self.address:
            raise PipelineError("The pipeline was not started: open it with `with Pipeline(...) as p:`.")
        return super()._link()

    def _check(self, silent: float) -> float:
        """A look at the orchestrator's own process; it needs no answer."""
        if self._process is None or self._session is None:
            raise PipelineError("The pipeline is closed: open it again with `with Pipeline(...) as p:`.")
        if self._process.poll() is not None:
            raise self._cause(self._session)
        return 0.0

    def _cause(self, session: Session) -> PipelineError:
        return session.failure() or OrchestratorEnded(session.last_words("orchestrator") or "none")


def _pass_on(life: socket.socket, on_notice: Callable[[Notice], None]) -> None:
    for notice in received(life):
        on_notice(notice)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The orchestrator ends by itself when its life socket closes; terminate it if it does not."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_CLOSING_SECONDS)
        return
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
