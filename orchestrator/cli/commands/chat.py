"""`launch-pipeline chat`: options to a conversation, and message after message until its user ends it."""

import difflib
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

from orchestrator.api.client import Client, Stream
from orchestrator.api.sampling import SamplingParams
from orchestrator.api.settings import PipelineSettings
from orchestrator.cli.help import BriefCommand
from orchestrator.cli.pipeline_options import address_option, facts, option, pipeline_options, without_effect
from orchestrator.cli.pipelines import first_models, print_notes, started, tokenizer_folder
from orchestrator.cli.printing import cut_off, reading
from orchestrator.cli.running_pipelines import RUNNING, held, running_pipeline
from orchestrator.cli.sampling_options import sampling, sampling_options
from orchestrator.machine.default_target import demo_note
from orchestrator.text.chat_template import ChatTemplate
from protocol.errors import InputError, PipelineError
from protocol.ineffective import Ineffective
from protocol.messages.client import Statistics
from protocol.paths import cache_folder
from protocol.security.private_files import write_private
from protocol.shown_names import model_name

HELP = """\
/help             this list
/clear            forget what was said; the system text stays
/system TEXT      the system text, before everything else; without TEXT: none
/save FILE        write the conversation as Markdown
/temperature X    0 takes the most probable token
/seed N           equal seeds give equal answers; without N: a fresh one each time
/quit             end; so does Ctrl-D

Enter sends. Alt-Enter, or a backslash at the end of the line, begins a new line. Ctrl-C stops an answer.
A message that begins with a slash: write two."""


@dataclass
class ChatConversation:
    """`save` writes a text to the file that the user names; it raises InputError if it can't."""

    params: SamplingParams
    save: Callable[[str, str], None]
    system: str = ""
    over: bool = False
    """The user asked to end the chat."""
    _said: list[dict[str, str]] = field(default_factory=list)

    def messages(self, question: str) -> list[dict[str, str]]:
        """All messages of the prompt for the answer to `question`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._said, {"role": "user", "content": question}]

    def answered(self, question: str, answer: str) -> None:
        """Add both to the conversation, unless the answer was stopped before its first word."""
        if answer:
            self._said += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def command(self, line: str) -> str:
        """Carry out a line that begins with one slash; the reply. Raises InputError for a wrong command or value."""
        name, _, rest = line[1:].strip().partition(" ")
        commands: dict[str, Callable[[str], str]] = {
            "help": lambda _: HELP,
            "clear": self._clear,
            "system": self._system,
            "save": self._save,
            "temperature": self._temperature,
            "seed": self._seed,
            "quit": self._quit,
        }
        if name not in commands:
            begun = [each for each in commands if name and each.startswith(name)]
            near = begun or difflib.get_close_matches(name, commands, 1)
            known = f"did you mean /{near[0]}? /help lists all" if near else f"there are /{', /'.join(commands)}"
            raise InputError(f"There is no /{name}: {known}.")
        return commands[name](rest.strip())

    def markdown(self) -> str:
        """The conversation as a document."""
        parts = [f"*System:* {self.system}"] if self.system else []
        parts += [f"**{message['role'].capitalize()}:**\n\n{message['content']}" for message in self._said]
        return "\n\n".join(parts) + "\n"

    def _clear(self, _: str) -> str:
        self._said.clear()
        return "Forgotten."

    def _system(self, text: str) -> str:
        self.system = text
        return "It holds from the next message on." if text else "There is no system text."

    def _save(self, file: str) -> str:
        if not file:
            raise InputError("/save needs the name of a file.")
        self.save(file, self.markdown())
        return f"Written to {file}."

    def _temperature(self, text: str) -> str:
        try:
            self._change(temperature=float(text))
        except ValueError as error:
            raise InputError(f"/temperature needs a number, for instance 0.7, not {text!r}.") from error
        return f"The temperature is {self.params.temperature:g}."

    def _seed(self, text: str) -> str:
        try:
            self._change(seed=int(text) if text else None)
        except ValueError as error:
            raise InputError(f"/seed needs a whole number, not {text!r}.") from error
        return "Each answer has a seed of its own." if self.params.seed is None else f"The seed is {self.params.seed}."

    def _quit(self, _: str) -> str:
        self.over = True
        return ""

    def _change(self, **values: float | None) -> None:
        changed = structs.replace(self.params, **values)
        changed.submit("", "check")
        self.params = changed


if TYPE_CHECKING:
    from orchestrator.cli.chat_screen import Screen

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
    from orchestrator.cli.chat_screen import screen

    notes = without_effect(settings, terminal=sys.stdin.isatty() and sys.stdout.isatty())
    params = sampling(options)
    if running is None:
        settings, first = first_models(settings, asks=True)
        notes = [*notes, first]
    lasting = running_pipeline(settings) if running is None else Client(running)
    with ExitStack() as stack:
        shown = stack.enter_context(screen(None if no_history else cache_folder() / "chat" / "history"))
        conversation = ChatConversation(params, _Files(shown.confirm).save, system)
        if lasting is None:
            client: Client = stack.enter_context(started(settings, notes, quiet=not shown.lasting, conversing=True))
        else:
            print_notes([*notes, RUNNING if running is None and shown.lasting else ""])
            client = stack.enter_context(held(lasting))
        state = client.state()
        template = ChatTemplate(tokenizer_folder(state, settings.target))
        if shown.lasting:
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
    """One command, or one message; two slashes begin one with a slash."""
    if line.startswith("/") and not line.startswith("//"):
        words = conversation.command(line)
        if words:
            screen.note(words)
        return
    question = line[1:] if line.startswith("//") else line
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
    stream.watch_reading(lambda *told: show("", reading(*told)))
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
