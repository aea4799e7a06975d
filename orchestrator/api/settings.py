"""What a user sets of a pipeline, in one struct, and what its orchestrator is told; all that can be checked is checked
here."""

import filecmp
import os
import socket
from pathlib import Path
from typing import Annotated, Any

import msgspec

from orchestrator.api.validation import out_of_range
from orchestrator.core.options import NOT_IN_AR, Options
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.core.workers import foreign_tokenizer
from orchestrator.machine.blas.library import HOW_TO_GET_ONE
from orchestrator.machine.drafts.draft_choice import DraftChoice, pair_for
from orchestrator.machine.drafts.shipped_drafts import with_successors
from orchestrator.machine.hardware import lacks_fast_blas
from orchestrator.machine.profiles.device_profiles import load_profile
from orchestrator.machine.sampling_defaults import model_sampling
from orchestrator.machine.servers import host_port
from orchestrator.machine.target import checked_hosts, traffic_note
from orchestrator.runtime.memory_plan import fitted, require_room
from orchestrator.runtime.setup import Listening, OrchestratorSetup
from protocol.contracts.coreml import OnProgress
from protocol.contracts.engines import (
    AUTO,
    NO_DRAFT,
    DraftEngineName,
    PrefillEngineName,
    TargetEngineName,
    draft_engines,
)
from protocol.contracts.target_hosts import TargetHosts
from protocol.contracts.tokenizer_fingerprint import first_difference
from protocol.errors import InputError
from protocol.ineffective import Facts, Ineffective
from protocol.paths import keys_folder
from protocol.security.addresses import tcp_address
from protocol.speculation.successors import SUCCESSORS

_HOPELESS = (
    "Without OpenBLAS a forward over 8 tokens takes as long here as 8 over one, so speculation can't help: "
    f"{HOW_TO_GET_ONE}."
)


def _guesses_alone(facts: Facts) -> bool:
    engine, draft = draft_engines().get(facts.get("draft_engine", "")), facts.get("draft")
    # The lookup beside such an engine knows the draft's table.
    return engine is not None and engine.model == "none" and not (draft and (Path(draft) / SUCCESSORS).is_file())


_OF_DRAFT_MODEL = (
    NOT_IN_AR,
    Ineffective("there is no draft", draft_engine=NO_DRAFT),
    Ineffective("the chosen draft engine guesses without a model", _guesses_alone),
)


class PipelineSettings(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keywords of `Pipeline`. A field of the same name as a command's option is that option."""

    target: str | None = None
    """A folder, a GGUF file or a Hugging Face id; None: the default, fetched on first use."""
    draft: Annotated[str | None, _OF_DRAFT_MODEL] = None
    """Likewise. None: the draft that is shipped for the target, if one is."""
    target_engine: TargetEngineName = "mlx"
    """none: the target is a worker of another machine, which comes by `listen`."""
    draft_engine: Annotated[DraftEngineName, NOT_IN_AR] = AUTO
    prefill_engine: PrefillEngineName = "none"
    listen: str | None = None
    """HOST:PORT where workers of other machines may come (`Pipeline.owner` invites them)."""
    draft_command: Annotated[tuple[str, ...], NOT_IN_AR] = ()
    """A program of the user's own that drafts."""
    target_texts: str = ""
    """A file of recorded texts that the target replays, without its model; no other request is served."""
    target_hosts: str | TargetHosts | None = None
    """A hosts file, or its content: divide the target among these hosts."""
    record: str = ""
    """Write every event of the state machine to this file."""
    pace: str | None = None
    """A shipped device profile's name or a file's path; the workers are then as slow as its devices."""
    trace: str = ""
    """A folder that every process writes its spans to at the end, for `orchestrator.lab.profile`."""

    def changed(self, **values: Any) -> "PipelineSettings":
        """With these values. Raises InputError, which names the keyword, for a wrong one."""
        paths = {name: os.fspath(value) for name, value in values.items() if isinstance(value, os.PathLike)}
        try:
            found = msgspec.convert(msgspec.structs.asdict(self) | values | paths, PipelineSettings)
        except msgspec.ValidationError as error:
            raise out_of_range(error) from error
        if found.strategy not in STRATEGIES:
            *others, last = STRATEGIES
            raise InputError(f"There is no strategy called {found.strategy!r}: choose {', '.join(others)} or {last}.")
        return found

    @property
    def options(self) -> Options:
        """What the state machine and the workers are told of them."""
        return Options(**{name: getattr(self, name) for name in Options.__struct_fields__})


def checked_setup(
    settings: PipelineSettings, on_progress: OnProgress, room: int | None = None
) -> tuple[OrchestratorSetup, str]:
    """The setup without session, address and life, and a note: one line for the user if a model is not as asked for.

    `room`: as of `fitted`. Raises InputError for what can't work.
    """
    _require_served(settings)
    hosts, prefill = settings.target_hosts, settings.prefill_engine
    own = bool(settings.draft_command)
    if settings.memory_check != "off" and settings.target_engine == "mlx" and hosts is None:
        for model in (settings.target, settings.draft):
            require_room(model)
    pair = pair_for(settings.target, settings.draft_engine, settings.draft, on_progress, own=own)
    folder, choice, options = pair.target, pair.draft, settings.options
    measured = settings.pace is not None or settings.trace
    if choice.auto is not None and (measured or own):
        # A second draft would change what is measured, and a program of the user's own has no engine.
        choice = DraftChoice("mlx", Path(choice.auto.checkpoint))
    # At a pace, with recorded texts, or elsewhere, a forward's time is not this processor's.
    computes = settings.target_engine == "mlx" and settings.pace is None and not settings.target_texts
    drafts = STRATEGIES[options.strategy].drafts
    hopeless = drafts and computes and lacks_fast_blas()
    if hopeless and options.strategy == "adaptive":
        options = msgspec.structs.replace(options, strategy="ar")
        drafts = False
    if choice.folder is not None and drafts:
        _require_shared_vocabulary(folder, choice.folder)
    if choice.engine == NO_DRAFT and settings.listen is None:
        options = msgspec.structs.replace(options, strategy="ar")
    setup = OrchestratorSetup(
        session="",
        address="",
        target=str(folder),
        draft=str(choice.folder or ""),
        successors=str(
            with_successors(folder, choice.folder or (Path(settings.draft) if settings.draft else None)) or ""
        ),
        target_engine=settings.target_engine,
        draft_engine=choice.engine,
        prefill_engine=prefill,
        target_texts=settings.target_texts,
        target_hosts=checked_hosts(hosts, folder, prefill) if isinstance(hosts, str) else hosts,
        options=options,
        sampling=model_sampling(folder),
        listening=None if settings.listen is None else _listening(settings.listen),
        draft_command=settings.draft_command,
        record=settings.record,
        pace=None if settings.pace is None else load_profile(settings.pace),
        auto=choice.auto if STRATEGIES[options.strategy].drafts else None,
        trace=settings.trace,
    )
    setup, memory_note = fitted(setup, room)
    notes = (
        pair.note,
        choice.note if drafts else "",
        _HOPELESS if hopeless else "",
        memory_note,
        traffic_note(setup.target_hosts),
    )
    return setup, " ".join(filter(None, notes))


def _listening(where: str) -> Listening:
    """Where workers of other machines may come. Raises InputError if this machine has no such address."""
    host, port = host_port(where, listening=True)
    try:
        # libzmq listens on addresses, not on names.
        numeric = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise InputError(
            f"Can't listen at {where}: {host} has no address here ({error.strerror}); give an address."
        ) from error
    return Listening(address=tcp_address(numeric, port, listening=True), folder=str(keys_folder()))


def _require_shared_vocabulary(target: Path, draft: Path) -> None:
    """Raises InputError, which names the first token that differs. Drafts without such a file are checked later."""
    files = [folder / "tokenizer.json" for folder in (target, draft)]
    if all(file.is_file() for file in files) and not filecmp.cmp(*files, shallow=False):
        difference = first_difference(target, draft)
        if difference is not None:
            raise InputError(foreign_tokenizer(str(draft), str(target), difference))


def _require_served(settings: PipelineSettings) -> None:
    """A pipeline needs a target or a way in for one, and a prefill engine needs shared memory with the target."""
    target, prefill, listen = settings.target_engine, settings.prefill_engine, settings.listen
    if prefill != "none" and not settings.arenas:
        raise InputError("A prefill engine hands KV over in shared memory: set arena_memory above 0.")
    if target == "none" and listen is None:
        raise InputError("The target engine none waits for a target of another machine: set listen to HOST:PORT.")
    if target == "none" and settings.target_hosts is not None:
        raise InputError(
            "Target hosts divide a target that this machine leads, and the target engine none starts none: leave one "
            "of them out."
        )
    if target == "none" and prefill != "none":
        raise InputError(
            "A prefill engine hands KV over in shared memory, which a target on another machine can't reach: leave "
            "the prefill engine out, or use a target on this machine."
        )
    if prefill == "guest" and listen is None:
        raise InputError("The prefill engine guest waits for a worker of another machine: set listen to HOST:PORT.")
