"""Pipelines of this user that keep running on this machine, which `generate` uses instead of loading models again.

`start` and `serve` leave the address of a pipeline in its private folder, which goes when the pipeline ends. Both sides
have default options but for the models: any other one may be what the user wants to see at work.
"""

from contextlib import suppress
from pathlib import Path

from orchestrator.api.client import Client
from orchestrator.api.settings import PipelineSettings
from orchestrator.machine.downloads.default_target import default_pair_state
from orchestrator.machine.models.checkpoints import resolve
from orchestrator.runtime.session import running_sessions
from protocol.errors import PipelineError
from protocol.security.private_files import read_private, write_private

_FILE = "lasting"
_ANSWER_SECONDS = 0.5


def keeps_running(client: Client, settings: PipelineSettings) -> None:
    """That other commands of this user may ask this pipeline, which does not end with a request."""
    if _plain(settings):
        write_private(Path(client.state().session) / _FILE, client.address.encode())


def running_pipeline(settings: PipelineSettings) -> Client | None:
    """One with the models of `settings` that answers; None for settings that ask for more than models."""
    if not _plain(settings):
        return None
    for folder in running_sessions():
        with suppress(PipelineError, OSError, UnicodeDecodeError):
            if (address := read_private(folder / _FILE)) is None:
                continue
            client = Client(address.decode())
            state = client.state(_ANSWER_SECONDS)
            # Another pipeline may have the address by now.
            ours = state.session == str(folder) and state.ready and "target" not in state.down
            if ours and _same(settings.draft, state.draft) and state.target == _target(settings):
                return client
    return None


def _plain(settings: PipelineSettings) -> bool:
    return settings.changed(target=None, draft=None, listen=None) == PipelineSettings()


def _same(draft: str | None, running: str) -> bool:
    """Any draft will do if none is named: the text does not depend on it."""
    return draft is None or str(resolve(draft, "draft")) == running


def _target(settings: PipelineSettings) -> str:
    return default_pair_state().folder if settings.target is None else str(resolve(str(settings.target), "target"))
