"""Pipelines of this user that keep running here: `generate` and `chat` ask them instead of loading models again.

`start` and `serve` leave the address of a pipeline in its private folder, which goes when the pipeline ends; so does
`generate` for the minutes that its pipeline outlives it. Both sides have default options but for the models: any other
one may be what the user wants to see at work.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from orchestrator.api.client import Client
from orchestrator.api.pipeline import Pipeline
from orchestrator.api.settings import PipelineSettings
from orchestrator.machine.checkpoints import resolve
from orchestrator.machine.default_target import default_pair_state
from orchestrator.machine.hardware import memory_bytes
from orchestrator.runtime.session import Session, running_sessions
from protocol.errors import PipelineError

RUNNING = "A pipeline with these models runs already, so none is started."
KEPT_MINUTES = 5.0
"""As Ollama keeps a model."""
_KEPT_SHARE = 0.25
"""Of this machine's memory: more is not occupied for somebody who did not ask for it."""
_ANSWER_SECONDS = 0.5
_HELD_SECONDS = 5.0


def keeps_running(client: Client, settings: PipelineSettings) -> None:
    """That other commands of this user may ask this pipeline, which does not end with a request."""
    if plain(settings):
        Session(Path(client.state().session)).offer(client.address)


def minutes_to_keep(asked: float | None, pipeline: Pipeline, settings: PipelineSettings) -> float:
    """How long the pipeline of a command outlives it: as `asked`, else only where a terminal tells its user so."""
    if not plain(settings) or settings.listen is not None:
        return 0.0
    if asked is not None:
        return asked
    small = pipeline.memory().weights <= _KEPT_SHARE * memory_bytes()
    return KEPT_MINUTES if small and sys.stderr.isatty() else 0.0


def running_pipeline(settings: PipelineSettings) -> Client | None:
    """One with the models of `settings` that answers; None for settings that ask for more than models."""
    if not plain(settings):
        return None
    for folder in running_sessions():
        with suppress(PipelineError, OSError):
            if not (address := Session(folder).offered):
                continue
            client = Client(address)
            state = client.state(_ANSWER_SECONDS)
            # Another pipeline may have the address by now.
            ours = state.session == str(folder) and state.ready and "target" not in state.down
            # Any draft will do if none is named: the text does not depend on it.
            drafts = settings.draft is None or str(resolve(settings.draft, "draft")) == state.draft
            if ours and drafts and state.target == _target(settings):
                return client
    return None


@contextmanager
def held(client: Client, every: float = _HELD_SECONDS) -> Iterator[Client]:
    """The context of a command that asks again after a while: a pipeline that somebody asks stays."""
    over = Event()

    def ask() -> None:
        while not over.wait(every):
            with suppress(PipelineError):
                client.state(_ANSWER_SECONDS)

    asking = Thread(target=ask, daemon=True, name="hold")
    asking.start()
    try:
        yield client
    finally:
        over.set()
        asking.join()


def plain(settings: PipelineSettings) -> bool:
    """Whether all options but the models have their defaults."""
    return settings.changed(target=None, draft=None, listen=None) == PipelineSettings()


def _target(settings: PipelineSettings) -> str:
    return default_pair_state().folder if settings.target is None else str(resolve(str(settings.target), "target"))
