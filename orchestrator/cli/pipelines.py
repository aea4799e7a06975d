"""A pipeline from the options of a command, with what its start tells the user on stderr."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from orchestrator.api.pipeline import Pipeline
from orchestrator.api.settings import PipelineSettings
from orchestrator.cli.sentences import say
from orchestrator.machine.checkpoints import cached, hub_reachable, resolve
from orchestrator.machine.default_target import VARIABLE, DefaultModel, default_pair_state, default_target
from orchestrator.machine.hardware import computes_on_processor, memory_bytes, usable_bytes
from orchestrator.machine.memory.budget import size
from orchestrator.machine.pairs.recommended_pairs import AGENTS, TALK, first_pair, fits, memory, modest, published
from orchestrator.machine.target import level_note
from orchestrator.runtime.notices import Notice
from protocol.contracts.coreml import OnProgress, Progress
from protocol.contracts.engines import draft_model
from protocol.errors import InputError
from protocol.messages.base import Role
from protocol.messages.client import PipelineState

_GAINS_NOTHING = "On a Mac's GPU speculation gains nothing with the default pair, whose forward takes 3 ms."


class ConversionBar:
    """`with ConversionBar(quiet) as bar: ...` and `bar(progress)` as often as there is something to report."""

    def __init__(self, quiet: bool) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        self._bar = Bar(*columns, console=Console(stderr=True, quiet=quiet), transient=True)
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("")
        self._bar.update(self._task, description=progress.stage, completed=progress.done, total=progress.total)


class Notices:
    """Called with each notice, in another thread.

    A command that prints a text meanwhile shows them at its end: the sentences, and how far the progress came.
    """

    def __init__(self, *, at_once: bool, quiet: bool = False) -> None:
        self._at_once = at_once
        self._quiet = quiet
        self._lock = Lock()
        self._held: list[str] = []
        self._progress = ""

    def __call__(self, notice: Notice) -> None:
        with self._lock:
            if self._quiet:
                return
            if notice.kind == "progress":
                before, self._progress = self._progress, _stage(notice.text)
                if self._at_once and self._progress != before:
                    click.echo(f"{self._progress} ...", err=True)
            else:
                self._progress = ""
                say(notice.text, err=True) if self._at_once else self._held.append(notice.text)

    def close(self) -> None:
        """The pipeline has ended."""
        with self._lock:
            for text in self._held:
                say(text, err=True)
            if self._progress and not self._at_once:
                say(f"{self._progress}: not finished, so that the next start does it.", err=True)
            self._held = []


def _stage(text: str) -> str:
    """The progress without its steps, which change all the time."""
    return text.partition(", ")[0]


def first_models(settings: PipelineSettings, *, asks: bool, tools: bool = False) -> tuple[PipelineSettings, str]:
    """The settings with models for a user who names none, and a sentence about them: on a Mac a recommended pair.

    `asks`: a person at the terminal is offered its download, until the default pair is on this disk. `tools`: only
    models do that know tools.
    """
    elsewhere = settings.listen or settings.target_hosts or settings.target_texts or settings.draft_command
    named = settings.target or settings.draft or settings.pace or os.environ.get(VARIABLE) or elsewhere
    if sys.platform != "darwin" or named or settings.target_engine != "mlx":
        return settings, ""
    drafts = draft_model(settings.draft_engine) != "none"
    if pair := first_pair(tools):
        found = settings.changed(target=pair.target, draft=pair.draft if drafts else None)
        return found, f"The models are {pair}: --pair and --target choose others."
    name = modest((TALK, AGENTS)[tools])
    if name is None:
        return settings, _GAINS_NOTHING
    models = published()[name]
    missing = [model for model in (models.target, models.draft) if cached(model.id) is None]
    left = f"{sum(model.weights(on_processor=False) for model in missing) / 1e9:.1f} GB"
    person = asks and sys.stdin.isatty() and sys.stderr.isatty() and not default_pair_state().folder
    question = f"{_GAINS_NOTHING} {name} fits this machine: download {left}? Otherwise the default pair answers."
    if person and hub_reachable() and click.confirm(question, default=False, err=True):
        return settings.changed(target=models.target.id, draft=models.draft.id if drafts else None), ""
    return settings, f"{_GAINS_NOTHING} Better: --pair {name} ({left} to download)."


def refuse_without_tools(program: str, model: str) -> None:
    """Raises InputError with a pair that `program` can use instead."""
    name = modest(AGENTS) or AGENTS[-1]
    processor, machine = computes_on_processor(), size(memory_bytes())
    fit = "fits into" if fits(published()[name], processor, usable_bytes()) else "is too much for"
    raise InputError(
        f"{program} works by tools, and the chat template of {model} knows none: run `launch-pipeline launch {program} "
        f"--pair {name}`, whose {size(memory(published()[name], processor))} {fit} this machine's {machine}, or see "
        "`launch-pipeline pairs`."
    )


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


def target_folder(name: str | None) -> Path:
    """As `model_folder`, of a target."""
    return model_folder(name, "target", default_target, quiet=False)


def model_folder(
    name: str | None, role: Role, default_of: Callable[[OnProgress], DefaultModel], *, quiet: bool
) -> Path:
    """The folder of the model `name`, or of the default one. A model may be fetched or converted for it."""
    with ConversionBar(quiet) as bar:
        if name is not None:
            return resolve(name, role, bar)
        default = default_of(bar)
    print_notes([default.note])
    return default.folder


def tokenizer_folder(state: PipelineState, target: str | None) -> Path:
    """The folder of tokenizer and chat template: that of `target`, or without one the running pipeline's."""
    if target is not None:
        return resolve(target, "target")
    folder = Path(state.target)
    if not folder.is_dir():
        raise InputError(
            f"That pipeline's target ({folder}) is not on this machine: add --target MODEL for its tokenizer."
        )
    return folder


def print_notes(sentences: Sequence[str]) -> None:
    """One line on stderr for each sentence that is not empty."""
    for sentence in filter(None, sentences):
        say(sentence, err=True)
