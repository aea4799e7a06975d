"""What a user sets of a pipeline: one struct from the command line, the Python keywords and the lab to the start."""

import os
from typing import Annotated, Any

import msgspec

from orchestrator.api.validation import out_of_range
from orchestrator.core.options import Options
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.runtime.link_emulation import EmulatedLink
from protocol.contracts.engines import (
    AUTO,
    NO_DRAFT,
    DraftEngineName,
    PrefillEngineName,
    TargetEngineName,
    draft_engines,
)
from protocol.contracts.target_hosts import TargetHosts
from protocol.errors import InputError
from protocol.ineffective import Facts, Ineffective


def _guesses_alone(facts: Facts) -> bool:
    engine = draft_engines().get(facts.get("draft_engine", ""))
    return engine is not None and engine.model == "none"


_OF_DRAFT = Ineffective("the strategy ar uses no draft", strategy="ar")
_OF_DRAFT_MODEL = (
    _OF_DRAFT,
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
    draft_engine: Annotated[DraftEngineName, _OF_DRAFT] = AUTO
    prefill_engine: PrefillEngineName = "none"
    listen: str | None = None
    """HOST:PORT where workers of other machines may come (`Pipeline.owner` invites them)."""
    draft_command: Annotated[tuple[str, ...], _OF_DRAFT] = ()
    """A program of the user's own that drafts."""
    target_texts: str = ""
    """A file of recorded texts that the target replays, without its model; no other request is served."""
    target_hosts: str | TargetHosts | None = None
    """A hosts file, or its content: divide the target among these hosts."""
    record: str = ""
    """Write every event of the state machine to this file."""
    pace: str | None = None
    """A shipped device profile's name or a file's path; the workers are then as slow as its devices."""
    draft_scale: float = 1.0
    """How many times as long as the profile's draft this draft takes."""
    draft_link: Annotated[EmulatedLink | None, _OF_DRAFT] = None
    """Delay what goes to the draft and comes from it, as a link between machines would."""
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
