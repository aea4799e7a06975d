"""A pipeline of one's own: starts the orchestrator process, waits until it is ready, ends it."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from orchestrator.api.client import STAMP, Client
from orchestrator.api.listening import listening, require_served
from orchestrator.api.owner import Owner
from orchestrator.api.validation import out_of_range
from orchestrator.core.options import Options, StrategyName
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.machine.checkpoints import resolve
from orchestrator.machine.converted_draft import OnProgress, converted_draft
from orchestrator.machine.device_profiles import load_profile
from orchestrator.machine.draft_choice import draft_for
from orchestrator.machine.target_hosts import checked_hosts
from orchestrator.runtime.link_emulation import EmulatedLink
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from protocol.contracts.engines import NO_DRAFT, DraftEngineName, PrefillEngineName, TargetEngineName
from protocol.contracts.target_hosts import TargetHosts
from protocol.errors import InputError, PipelineError, blaming
from protocol.kv.segments import free_shared_memory
from protocol.messages.client import Inquire, PipelineState, ToClient
from protocol.security.addresses import require_local
from protocol.transport.link import Link

_CLOSING_SECONDS = 7.0


class Pipeline(Client):
    """`with Pipeline() as p: p.generate("def f(")`: three processes, gone at the end of the block.

    `target` and `draft` are folders or Hugging Face ids (None: the demo pair); further keywords are
    the fields of `Options`. A target with another tokenizer than the demo draft's and no `draft` decodes alone, and
    `note` says so. Raises InputError for what can't work, PipelineError if starting fails.
    """

    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        *,
        target_engine: TargetEngineName = "mlx",
        draft_engine: DraftEngineName = "mlx",
        prefill_engine: PrefillEngineName = "none",
        address: str | None = None,
        listen: str | None = None,
        draft_command: tuple[str, ...] = (),
        target_hosts: str | TargetHosts | None = None,
        record: str = "",
        on_progress: OnProgress = lambda _: None,
        pace: str | None = None,
        draft_link: EmulatedLink | None = None,
        trace: str = "",
        on_wait: Callable[[float], None] = lambda _: None,
        **options: Any,
    ) -> None:
        """`on_progress` is called while a draft is converted for Core ML, which happens once, in here; `on_wait`
        several times a second while models load, with the seconds so far.

        `listen`: HOST:PORT where workers of other machines may come (`.owner` invites them); with `target_engine`
        "none" one of them is the target.
        `pace`: a shipped device profile's name or the path of one's own; the workers are then as slow as its devices.
        `draft_link`: delays what goes to the draft and comes from it, as a link between machines would.
        `target_hosts`: a hosts file, or what it says: divide the target among these hosts.
        `trace`: a folder that every process writes its spans to at the end, for `orchestrator.tools.profile`.
        """
        self._options = affordable(checked_options(options))
        choice = draft_for(target, draft_engine, draft, on_progress, own=bool(draft_command))
        self.note = choice.note if STRATEGIES[self._options.strategy].drafts else ""
        """One line for the user about the draft, if it is not as he asked."""
        if choice.engine == NO_DRAFT and listen is None:
            self._options = msgspec.structs.replace(self._options, strategy="ar")
        self._paths = {"target": str(resolve(target, "target")), "draft": str(choice.folder or "")}
        self._draft_engine: DraftEngineName = choice.engine
        self._prefill_engine: PrefillEngineName = prefill_engine
        if prefill_engine != "none" and not self._options.arena_memory:
            raise InputError("A prefill engine hands KV over in shared memory: set --arena-memory above 0.")
        self._target_hosts = (
            checked_hosts(target_hosts, Path(self._paths["target"]), prefill_engine)
            if isinstance(target_hosts, str)
            else target_hosts
        )
        if prefill_engine == "coreml":
            self._paths["prefill"] = str(converted_draft(self._paths["target"], on_progress))
        self._listening = None if listen is None else listening(listen)
        self._target_engine: TargetEngineName = target_engine
        require_served(target_engine, prefill_engine, self._listening, target_hosts is not None)
        self._draft_command = draft_command
        self._record = record
        self._draft_link = draft_link
        self._trace = trace
        self._pace = None if pace is None else load_profile(pace)
        self._on_wait = on_wait
        self._session: Session | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._life: socket.socket | None = None
        if address is not None:
            require_local(address)
        super().__init__(address or "")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> PipelineState:
        """Start the processes and wait until models are loaded."""
        self._session = Session.create()
        self.address = self.address or self._session.client_address
        try:
            self._spawn(self._session)
            return self._await_ready(self._session)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every process of the pipeline and remove its folder. A second Ctrl-C in here ends them at once."""
        process, session = self._process, self._session
        self._process = self._session = None
        try:
            if self._life is not None:
                self._life.close()
            if process is not None:
                _end(process)
        finally:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
            if session is not None:
                session.remove()

    @property
    def strategy(self) -> StrategyName:
        """The strategy in force: `ar` for a pipeline that can get no draft, whatever was asked for."""
        return self._options.strategy

    @property
    def owner(self) -> Owner:
        """Invites workers of other machines, lists and revokes them; of a pipeline that listens."""
        if self._session is None or self._listening is None:
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
        setup = OrchestratorSetup(
            session=str(session.folder),
            address=self.address,
            target=self._paths["target"],
            draft=self._paths["draft"],
            target_engine=self._target_engine,
            draft_engine=self._draft_engine,
            prefill_engine=self._prefill_engine,
            prefill=self._paths.get("prefill", ""),
            target_hosts=self._target_hosts,
            options=self._options,
            listening=self._listening,
            life=theirs.fileno(),
            draft_command=self._draft_command,
            record=self._record,
            trace=self._trace,
            draft_link=self._draft_link,
            pace=self._pace,
        )
        with theirs, session.log("orchestrator").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator", msgspec.json.encode(setup).decode()],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _await_ready(self, session: Session) -> PipelineState:
        began = time.monotonic()
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
                self._on_wait(time.monotonic() - began)
        finally:
            link.close()

    def _check(self, silent: float) -> float:
        """Our own orchestrator can be looked at directly."""
        if self._process is None or self._session is None:
            raise PipelineError("The pipeline is closed: open it again with `with Pipeline(...) as p:`.")
        if self._process.poll() is not None:
            raise self._cause(self._session)
        return 0.0

    def _cause(self, session: Session) -> PipelineError:
        words = session.last_words("orchestrator") or "none"
        unknown = f"The orchestrator ended unexpectedly; start it again. Its last words: {words}"
        return session.failure() or PipelineError(unknown)


def checked_options(options: dict[str, Any]) -> Options:
    """Options from keywords. Raises InputError naming the one that is wrong."""
    try:
        return msgspec.convert(options, Options)
    except msgspec.ValidationError as error:
        raise InputError(f"{out_of_range(error)} See `launch-pipeline generate --help`.") from error


def affordable(options: Options) -> Options:
    """With no more memory for KV than half of what the system has for sharing."""
    free = free_shared_memory()
    limit = options.arena_memory if free is None else min(options.arena_memory, free >> 21)
    return msgspec.structs.replace(options, arena_memory=limit)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The orchestrator ends in good order when its life socket closes; help it if it does not."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_CLOSING_SECONDS)
        return
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
