"""A pipeline from the options of a command, with what its start tells the user on stderr."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from orchestrator.api.client import Client
from orchestrator.api.pipeline import Pipeline
from orchestrator.api.settings import PipelineSettings
from orchestrator.cli.conversion_bar import ConversionBar
from orchestrator.cli.notices import Notices
from orchestrator.cli.sentences import say
from orchestrator.machine.checkpoints import resolve
from orchestrator.machine.default_target import default_target
from orchestrator.machine.target import level_note
from orchestrator.runtime.notices import Notice
from protocol.errors import InputError


def opened(
    settings: PipelineSettings,
    notes: Sequence[str] = (),
    *,
    quiet: bool,
    address: str | None = None,
    on_notice: Callable[[Notice], None] | None = None,
    conversing: bool = False,
) -> Pipeline:
    """A pipeline that is not started yet; models may be fetched for it. `notes` are printed once it is valid, and if it
    is for `conversing`, how many tokens of conversations it keeps."""
    with ConversionBar(quiet) as bar:
        pipeline = Pipeline(settings=settings, address=address, on_progress=bar, on_notice=on_notice)
    print_notes([pipeline.note, *notes, pipeline.keeps if conversing else ""])
    return pipeline


@contextmanager
def started(
    settings: PipelineSettings,
    notes: Sequence[str] = (),
    *,
    quiet: bool,
    address: str | None = None,
    at_once: bool = False,
    conversing: bool = False,
) -> Iterator[Pipeline]:
    """The context of a pipeline that runs. `at_once`: nothing else is printed while it does. `conversing`: as of
    `opened`, unless `quiet`."""
    with ExitStack() as stack:
        notices = Notices(at_once=at_once, quiet=quiet)
        stack.callback(notices.close)
        conversing = conversing and not quiet
        pipeline = opened(settings, notes, quiet=quiet, address=address, on_notice=notices, conversing=conversing)
        loading = "Loading models; what you type is kept ..." if conversing else "Loading models ..."
        with Console(stderr=True, quiet=quiet).status(loading):
            stack.callback(pipeline.close)
            state = pipeline.start()
        if not quiet:
            print_notes([level_note(state.level)])
        yield pipeline


def target_folder(name: str | None, *, quiet: bool) -> Path:
    """The folder of the target `name`, or of the default target. A model may be fetched or converted for it."""
    with ConversionBar(quiet) as bar:
        if name is not None:
            return resolve(name, "target", bar)
        default = default_target(bar)
    print_notes([default.note])
    return default.folder


def tokenizer_folder(client: Client, target: str | None) -> Path:
    """The folder of tokenizer and chat template: that of `target`, or without one the running pipeline's."""
    if target is not None:
        return resolve(target, "target")
    folder = Path(client.state().target)
    if not folder.is_dir():
        raise InputError(
            f"That pipeline's target ({folder}) is not on this machine: add --target MODEL for its tokenizer."
        )
    return folder


def print_notes(sentences: Sequence[str]) -> None:
    """One line on stderr for each sentence that is not empty."""
    for sentence in filter(None, sentences):
        say(sentence, err=True)
