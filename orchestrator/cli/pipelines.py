"""A pipeline from the options of a command, with what its start tells the user on stderr."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from orchestrator.api.client import Client
from orchestrator.api.pipeline import Pipeline
from orchestrator.cli.conversion_bar import ConversionBar
from orchestrator.cli.notices import Notices
from orchestrator.cli.options import given_only
from orchestrator.machine.downloads.default_target import default_target
from orchestrator.machine.models.checkpoints import resolve
from orchestrator.machine.models.levels import level_note
from orchestrator.runtime.notices import Notice
from protocol.errors import InputError


class Starting:
    """Context of a pipeline, which shows on stderr that models are loading."""

    def __init__(self, pipeline: Pipeline, notices: Notices, quiet: bool) -> None:
        self._pipeline = pipeline
        self._notices = notices
        self._quiet = quiet
        self._stack = ExitStack()

    def __enter__(self) -> Pipeline:
        console = Console(stderr=True, quiet=self._quiet)
        with console.status("Loading models ..."):
            pipeline = self._stack.enter_context(self._pipeline)
        if not self._quiet:
            print_notes([level_note(pipeline.state().level)])
        return pipeline

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._notices.close()


def opened(
    options: Mapping[str, Any],
    notes: Sequence[str] = (),
    *,
    quiet: bool,
    on_notice: Callable[[Notice], None] | None = None,
    conversing: bool = False,
) -> Pipeline:
    """A pipeline that is not started yet; models may be fetched for it. `notes` are printed once it is valid, and if it
    is for `conversing`, how many tokens of conversations it keeps."""
    with ConversionBar(quiet) as bar:
        pipeline = Pipeline(on_progress=bar, on_notice=on_notice, **given_only(options))
    print_notes([pipeline.note, *notes, pipeline.keeps if conversing else ""])
    return pipeline


def started(
    options: Mapping[str, Any],
    notes: Sequence[str] = (),
    *,
    quiet: bool,
    at_once: bool = False,
    conversing: bool = False,
) -> Starting:
    """The context of a pipeline that starts when it is entered. `at_once`: nothing else is printed while it runs."""
    notices = Notices(at_once=at_once, quiet=quiet)
    return Starting(
        opened(options, notes, quiet=quiet, on_notice=notices, conversing=conversing and not quiet), notices, quiet
    )


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
        click.echo(sentence, err=True)
