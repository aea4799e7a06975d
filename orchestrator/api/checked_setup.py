"""What the user asked of a pipeline to what its orchestrator is told; all that can be checked is checked here."""

import filecmp
import socket
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.api.caller import caller_level
from orchestrator.api.memory_check import fitted
from orchestrator.api.sampling.ineffective import IneffectiveOption, ineffective
from orchestrator.api.validation import out_of_range
from orchestrator.core.options import Options
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.core.workers import foreign_tokenizer
from orchestrator.machine.blas.library import HOW_TO_GET_ONE
from orchestrator.machine.drafts.converted_draft import converted_draft
from orchestrator.machine.drafts.draft_choice import DraftChoice
from orchestrator.machine.drafts.pair_choice import pair_for
from orchestrator.machine.hardware import lacks_fast_blas
from orchestrator.machine.known_servers import host_port
from orchestrator.machine.profiles.device_profiles import load_profile
from orchestrator.machine.progress import OnProgress
from orchestrator.machine.sampling_defaults import model_sampling
from orchestrator.machine.target_hosts import checked_hosts, traffic_note
from orchestrator.runtime.setup import Listening, OrchestratorSetup
from protocol.contracts.engines import AUTO, NO_DRAFT
from protocol.contracts.kv_bits import UNQUANTIZED
from protocol.contracts.target_hosts import TargetHosts
from protocol.contracts.tokenizer_fingerprint import first_difference
from protocol.errors import InputError
from protocol.kv.segments import free_shared_memory
from protocol.paths import keys_folder
from protocol.security.addresses import tcp_address

_HOPELESS = (
    "Without OpenBLAS a forward over 8 tokens takes as long here as 8 over one, so speculation can't help: "
    f"{HOW_TO_GET_ONE}."
)
_DEFAULTS = msgspec.structs.asdict(Options()) | {"draft_engine": AUTO, "prefill_engine": "none", "draft_command": ()}
"""Of the keywords that may have no effect; of others None."""


def checked_setup(
    target: str | None,
    draft: str | None,
    target_hosts: str | TargetHosts | None,
    listen: str | None,
    pace: str | None,
    draft_scale: float,
    options: Options,
    on_progress: OnProgress,
    room: int | None = None,
    **others: Any,
) -> tuple[OrchestratorSetup, str]:
    """The setup without session, address and life, and a note: one line for the user if a model is not as asked for.

    `room`: as of `fitted`. `others` are fields of the setup as they are, the three engines among them.
    Raises InputError for what can't work.
    """
    _require_served(others["target_engine"], others["prefill_engine"], listen, target_hosts, options)
    pair = pair_for(target, others["draft_engine"], draft, on_progress, own=bool(others["draft_command"]))
    folder, choice = pair.target, pair.draft
    measured = pace is not None or others["draft_link"] is not None or others["trace"]
    if choice.auto is not None and (measured or others["draft_command"]):
        # A second draft would change what is measured, and a program of the user's own has no engine.
        choice = DraftChoice("mlx", Path(choice.auto.checkpoint))
    # At a pace, with recorded texts, or elsewhere, a forward's time is not this processor's.
    computes = others["target_engine"] == "mlx" and pace is None and not others["target_texts"]
    hopeless = STRATEGIES[options.strategy].drafts and computes and lacks_fast_blas()
    if hopeless and options.strategy == "adaptive":
        options = msgspec.structs.replace(options, strategy="ar")
    note = choice.note if STRATEGIES[options.strategy].drafts else ""
    if choice.folder is not None and STRATEGIES[options.strategy].drafts:
        _require_shared_vocabulary(folder, choice.folder)
    if choice.engine == NO_DRAFT and listen is None:
        options = msgspec.structs.replace(options, strategy="ar")
    prefill = others["prefill_engine"]
    setup = OrchestratorSetup(
        session="",
        address="",
        target=str(folder),
        draft=str(choice.folder or ""),
        prefill=str(converted_draft(str(folder), on_progress)) if prefill == "coreml" else "",
        target_hosts=checked_hosts(target_hosts, folder, prefill) if isinstance(target_hosts, str) else target_hosts,
        options=options,
        sampling=model_sampling(folder),
        listening=None if listen is None else _listening(listen),
        pace=None if pace is None else load_profile(pace).with_draft(draft_scale),
        auto=choice.auto if STRATEGIES[options.strategy].drafts else None,
        **{**others, "draft_engine": choice.engine},
    )
    setup, memory_note = fitted(setup, room)
    notes = (pair.note, note, _HOPELESS if hopeless else "", memory_note, traffic_note(setup.target_hosts))
    return setup, " ".join(filter(None, notes))


def checked_options(options: Mapping[str, Any]) -> Options:
    """Options from keywords. Raises InputError, which names the keyword, for a wrong one."""
    try:
        checked = msgspec.convert(dict(options), Options)
    except msgspec.ValidationError as error:
        raise out_of_range(error) from error
    if checked.strategy not in STRATEGIES:
        *others, last = STRATEGIES
        choices = f"{', '.join(others)} or {last}"
        raise InputError(f"There is no strategy called {checked.strategy!r}: choose {choices}.")
    return checked


def affordable(options: Options) -> Options:
    """With no more memory for arenas than half of what the system has for sharing."""
    free = free_shared_memory()
    if free is None or options.arena_memory == "auto":
        return options
    return msgspec.structs.replace(options, arena_memory=min(options.arena_memory, free >> 21))


def warn_ineffective(options: Options, **keywords: Any) -> None:
    """An IneffectiveOption warning for each option that is not the default and changes nothing."""
    values = {**msgspec.structs.asdict(options), **keywords}
    given = {name: name for name, value in values.items() if value != _DEFAULTS.get(name)}
    for sentence in ineffective(values, given):
        warnings.warn(sentence, IneffectiveOption, caller_level())


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


def _require_served(
    target: str, prefill: str, listen: str | None, hosts: str | TargetHosts | None, options: Options
) -> None:
    """A pipeline needs a target or a way in for one, and a prefill engine needs shared memory with the target."""
    if prefill != "none" and not options.arenas:
        raise InputError("A prefill engine hands KV over in shared memory: set arena_memory above 0.")
    if prefill == "coreml" and options.kv_bits != UNQUANTIZED:
        raise InputError("A Core ML prefill worker can't quantize KV: use the prefill engine mlx, or kv_bits 16.")
    if target == "none" and listen is None:
        raise InputError("The target engine none waits for a target of another machine: set listen to HOST:PORT.")
    if target == "none" and hosts is not None:
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
