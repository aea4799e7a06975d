"""`launch-pipeline chat`: options to a conversation."""

import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import click

from orchestrator.api.client import Client
from orchestrator.cli.chat.conversation import ChatConversation
from orchestrator.cli.chat.session import Answerer, converse
from orchestrator.cli.options import address_option, pipeline_options, without_effect
from orchestrator.cli.pipelines import print_notes, started, tokenizer_folder
from orchestrator.cli.sampling_options import sampling, sampling_options
from orchestrator.machine.downloads.default_target import demo_note
from orchestrator.runtime.request_state import require_compatible
from orchestrator.text.chat_template import ChatTemplate
from protocol.contracts.engines import NO_DRAFT
from protocol.errors import InputError
from protocol.paths import cache_folder
from protocol.security.private_files import write_private

_MAX_TOKENS = 1024
"""Of one answer."""


@click.command()
@click.option("--system", default="", metavar="TEXT", help="System text, before everything else.")
@click.option("--no-history", is_flag=True, help="Do not keep the typed lines in a file.")
@address_option
@sampling_options(max_tokens=_MAX_TOKENS)
@pipeline_options
def chat(system: str, no_history: bool, address: str | None, **options: Any) -> None:
    """Talk with the target in the terminal; /help lists the commands.

    Without a terminal, each line of stdin is a message and its answer goes to stdout.

    \b
    launch-pipeline chat --pair qwen2.5-3b --preset balanced
    launch-pipeline chat --system "Answer in one sentence."
    echo "What is a token tree?" | launch-pipeline chat --address tcp://127.0.0.1:5570
    """
    # Markdown and the prompt line take a while to import.
    from orchestrator.cli.chat.screen import screen

    notes = without_effect(options, terminal=sys.stdin.isatty() and sys.stdout.isatty())
    conversation = ChatConversation(sampling(options), _Files().save, system)
    if address is None and options["draft_engine"] != NO_DRAFT:
        require_compatible(conversation.params.verification, options["strategy"])
    shown = screen(None if no_history else cache_folder() / "chat" / "history")
    with ExitStack() as stack:
        if address is None:
            client: Client = stack.enter_context(started(options, notes, quiet=not shown.lasting, conversing=True))
        else:
            print_notes(notes)
            client = Client(address)
        template = ChatTemplate(tokenizer_folder(client, options["target"]))
        if shown.lasting:
            print_notes([demo_note(client.state().target)])
            shown.note(_welcome(template))
        # Ctrl-C is one of the ways to end a chat.
        with suppress(KeyboardInterrupt) if shown.lasting else ExitStack():
            converse(shown, conversation, Answerer(client, template))


def _welcome(template: ChatTemplate) -> str:
    note = "" if template.own else " This model has no chat template, so it was probably not trained to converse."
    return f"Enter sends, /help tells more, Ctrl-D ends.{note}"


class _Files:
    """The files that this chat was saved to; no other file is overwritten."""

    def __init__(self) -> None:
        self._ours: set[Path] = set()

    def save(self, file: str, text: str) -> None:
        path = Path(file).expanduser().absolute()
        if path.exists() and path not in self._ours:
            raise InputError(f"{path} is there already: choose another file.")
        try:
            write_private(path, text.encode())
        except OSError as error:
            raise InputError(f"{path} can't be written ({error.strerror}): choose another file.") from error
        self._ours.add(path)
