"""`launch-pipeline chat`: options to a conversation, and message after message until its user ends it."""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

from orchestrator.api.client import Client, Stream
from orchestrator.api.settings import PipelineSettings
from orchestrator.cli.chat.conversation import ChatConversation, is_command, without_escape
from orchestrator.cli.help import BriefCommand
from orchestrator.cli.pipeline_options import address_option, facts, option, pipeline_options, without_effect
from orchestrator.cli.pipelines import print_notes, started, tokenizer_folder
from orchestrator.cli.report import cut_off, reading
from orchestrator.cli.running_pipelines import RUNNING, held, running_pipeline
from orchestrator.cli.sampling_options import fitting_strategy, sampling, sampling_options
from orchestrator.machine.default_target import demo_note
from orchestrator.text.chat_template import ChatTemplate
from protocol.errors import InputError, PipelineError
from protocol.ineffective import Ineffective
from protocol.messages.client import Statistics
from protocol.paths import cache_folder
from protocol.security.private_files import write_private
from protocol.shown_names import model_name

if TYPE_CHECKING:
    from orchestrator.cli.chat.screen import Screen

_ENDING = "Ctrl-C again, or Ctrl-D, ends the chat."
Show = Callable[[str, str], None]
"""The answer so far, and the status line."""
_FULL = "The conversation fills the context: /clear forgets what was said, so that there is room for answers again."
_SILENT = "The model ended its answer without a word: say it in other words, or /clear what was said."


@click.command(cls=BriefCommand, brief="pair target draft address system no-history max-tokens temperature preset seed")
@click.option("--system", default="", metavar="TEXT", help="System text, before everything else.")
@option(
    "--no-history",
    Ineffective("lines are remembered only on a terminal", terminal=False),
    is_flag=True,
    help="Do not keep the typed lines in a file.",
)
@address_option
@sampling_options
@pipeline_options
@facts(requests="in turn", temperature=None)
def chat(system: str, no_history: bool, running: str | None, settings: PipelineSettings, **options: Any) -> None:
    """Talk with the target in the terminal; /help lists the commands.

    Without a terminal, each line of stdin is a message and its answer goes to stdout.

    \b
    launch-pipeline chat --pair qwen2.5-3b --preset balanced
    launch-pipeline chat --system "Answer in one sentence."
    echo "Hi" | launch-pipeline chat --address tcp://127.0.0.1:5570
    """
    # Markdown and the prompt line take a while to import.
    from orchestrator.cli.chat.screen import screen

    notes = without_effect(settings, terminal=sys.stdin.isatty() and sys.stdout.isatty())
    params = sampling(options)
    if running is None:
        settings, note = fitting_strategy(settings, params)
        notes = [*notes, note]
    lasting = running_pipeline(settings) if running is None else Client(running)
    with ExitStack() as stack:
        shown = stack.enter_context(screen(None if no_history else cache_folder() / "chat" / "history"))
        conversation = ChatConversation(params, _Files(shown.confirm).save, system)
        if lasting is None:
            client: Client = stack.enter_context(started(settings, notes, quiet=not shown.lasting, conversing=True))
        else:
            print_notes([*notes, RUNNING if running is None and shown.lasting else ""])
            client = stack.enter_context(held(lasting))
        template = ChatTemplate(tokenizer_folder(client, settings.target))
        if shown.lasting:
            state = client.state()
            print_notes([demo_note(state.target)])
            shown.note(f"{model_name(state.target)}. {_welcome(template)}")
        # Ctrl-C is one of the ways to end a chat.
        with suppress(KeyboardInterrupt) if shown.lasting else ExitStack():
            converse(shown, conversation, Answerer(client, template))


def _welcome(template: ChatTemplate) -> str:
    note = "" if template.own else " This model has no chat template, so it was probably not trained to converse."
    return f"Enter sends, /help tells more, Ctrl-D ends.{note}"


class _Files:
    """The files that this chat was saved to; others are overwritten only if the user confirms it."""

    def __init__(self, confirm: Callable[[str], bool]) -> None:
        self._confirm = confirm
        self._ours: set[Path] = set()

    def save(self, file: str, text: str) -> None:
        path = Path(file).expanduser().absolute()
        known = path in self._ours or not path.is_file()
        if not known and not self._confirm(f"{file} is there already. Overwrite it?"):
            raise InputError(f"{file} is there already: choose another file.")
        try:
            write_private(path, text.encode())
        except OSError as error:
            raise InputError(f"{file} can't be written ({error.strerror}): choose another file.") from error
        self._ours.add(path)


@dataclass(frozen=True)
class StreamedAnswer:
    text: str
    status: str
    stopped: bool = False
    """The user stopped it with Ctrl-C, and the request was cancelled."""
    note: str = ""
    """Why there is no text, or no more of it."""


@dataclass(frozen=True)
class Answerer:
    """Asks the pipeline behind `client` with prompts that `template` makes."""

    client: Client
    template: ChatTemplate

    def answer(self, conversation: ChatConversation, question: str, show: Show) -> StreamedAnswer:
        """Raises PipelineError if the pipeline refuses; nothing of the conversation has changed then."""
        params = conversation.params
        stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
        params = structs.replace(params, stop=[*stops, *self.template.stops])
        tokens = self.template.tokens(conversation.messages(question))
        with self.client.stream(tokens, params) as stream:
            return _read(stream, show, params.max_tokens)


def converse(screen: "Screen", conversation: ChatConversation, answerer: Answerer) -> None:
    """Until /quit, the end of the input, or two Ctrl-C in a row on an empty line. Without a terminal any Ctrl-C or
    PipelineError ends it."""
    interrupted = False
    while not conversation.over:
        try:
            line = screen.ask()
        except KeyboardInterrupt:
            if interrupted or not screen.lasting:
                raise
            interrupted = True
            screen.note(_ENDING)
            continue
        if line is None:
            return
        interrupted = False
        if line.strip():
            try:
                _turn(screen, conversation, answerer, line.strip())
            except (PipelineError, KeyboardInterrupt) as error:
                if not screen.lasting:
                    raise
                screen.note(str(error) or "Stopped.", wrong=True)


def _turn(screen: "Screen", conversation: ChatConversation, answerer: Answerer, line: str) -> None:
    """One message or command."""
    if is_command(line):
        words = conversation.command(line)
        if words:
            screen.note(words)
        return
    question = without_escape(line)
    with screen.answering() as shown:
        answer = answerer.answer(conversation, question, shown.show)
        # First of all: another Ctrl-C may end what follows.
        conversation.answered(question, answer.text)
        shown.finish(answer.text, answer.status)
    if answer.note:
        screen.note(answer.note, wrong=True)
    if answer.stopped and not screen.lasting:
        raise KeyboardInterrupt


def _read(stream: Stream, show: Show, most: int | None) -> StreamedAnswer:
    """`most`: tokens of the answer, if the context has room for them."""
    pieces: list[str] = []
    first = None
    stream.watch_reading(lambda tokens, total: show("", reading(tokens, total)))
    try:
        for piece in stream:
            now = time.monotonic()
            # The time of prefill is no part of the rate, so the first piece only starts the clock.
            began, before = first = first or (now, stream.tokens)
            rate = (stream.tokens - before) / (now - began) if now > began else None
            pieces.append(piece)
            show("".join(pieces).lstrip(), status(stream.tokens, rate))
    except KeyboardInterrupt:
        text = "".join(pieces).strip()
        return StreamedAnswer(text, f"{status(stream.tokens, None)} · stopped", stopped=True)
    assert stream.result is not None
    figures = stream.result.statistics
    line = status(figures.generated_tokens, figures.tokens_per_second, figures)
    text = "".join(pieces).strip()
    return StreamedAnswer(text, line, note=cut_off(stream.result, most, _FULL) or ("" if text else _SILENT))


def status(tokens: int, rate: float | None, ended: Statistics | None = None) -> str:
    """`ended`: the figures of a whole answer, for what speculation gained."""
    parts = [f"{tokens} tokens"]
    parts += [] if rate is None else [f"{rate:.1f} tokens/s"]
    if ended is not None and ended.speedup is not None:
        parts += [f"{ended.speedup:.1f}× plain decoding", f"{ended.tokens_per_round:.1f} tokens a round"]
        hits = ended.overlapped_hit_rate
        parts += [] if hits is None else [f"hit rate {hits:.0%}"]
    return " · ".join(parts)
