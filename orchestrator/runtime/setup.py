"""All that an orchestrator process is told at its start, as one JSON argument."""

import sys

import msgspec

from orchestrator.core.options import Options
from orchestrator.machine.device_profiles import DeviceProfile
from orchestrator.runtime.link_emulation import EmulatedLink
from protocol.contracts.engines import DraftEngineName, PrefillEngineName, TargetEngineName, draft_model
from protocol.contracts.target_hosts import TargetHosts


class Listening(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers of other machines may come."""

    address: str
    """tcp://HOST:PORT; port 0 picks one."""
    folder: str
    """Where this machine's keys and the pins of its guests are."""


class OrchestratorSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Paths are local and checked; nothing here came over a network."""

    session: str
    """The session folder."""
    address: str
    """Where clients connect."""
    target: str
    draft: str
    """Model folder; empty for a draft without a model of its own, which is given the target's."""
    target_engine: TargetEngineName = "mlx"
    draft_engine: DraftEngineName = "mlx"
    prefill_engine: PrefillEngineName = "none"
    prefill: str = ""
    """Folder of the target's conversion that reads prompts; empty if the target's own is used."""
    target_hosts: TargetHosts | None = None
    """Hosts that share the target among them."""
    options: Options = Options()
    listening: Listening | None = None
    life: int | None = None
    """A socket shared with the parent; its end of file means that the parent is gone."""
    prefill_chunk: int = 512
    draft_command: tuple[str, ...] = ()
    """Run this instead of our draft worker: for drafting algorithms of the user's own."""
    record: str = ""
    """Write every event of the state machine to this file."""
    draft_link: EmulatedLink | None = None
    """Let the draft seem as far away as this link makes it."""
    pace: DeviceProfile | None = None
    """Let the workers be as slow as these devices."""
    trace: str = ""
    """Folder that every process writes its spans to at the end; empty records none."""

    def __post_init__(self) -> None:
        """Raises InputError for a draft engine that there is not."""
        draft_model(self.draft_engine)

    @classmethod
    def from_arguments(cls) -> "OrchestratorSetup":
        return msgspec.json.decode(sys.argv[1], type=cls)
