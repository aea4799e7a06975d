"""The chat: message after message until its user ends it, each answer as it comes. Knows no terminal."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import structs

from orchestrator.api.client import Client, Stream
from orchestrator.cli.chat.conversation import ChatConversation, is_command, without_escape
from orchestrator.text.chat_template import ChatTemplate
from protocol.errors import PipelineError

if TYPE_CHECKING:
    from orchestrator.cli.chat.screen import Screen

_ENDING = "Ctrl-C again, or Ctrl-D, ends the chat."
Show = Callable[[str, str], None]
"""The answer so far, and the status line."""


@dataclass(frozen=True)
class StreamedAnswer:
    text: str
    status: str
    stopped: bool = False
    """The user stopped it with Ctrl-C, and the request was cancelled."""


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
            return _read(stream, show)


def converse(screen: "Screen", conversation: ChatConversation, answerer: Answerer) -> None:
    """Until /quit, the end of the input, or two Ctrl-C in a row. Without a terminal a PipelineError ends it too."""
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
                interrupted = _turn(screen, conversation, answerer, line.strip())
            except PipelineError as error:
                if not screen.lasting:
                    raise
                screen.note(str(error), wrong=True)


def _turn(screen: "Screen", conversation: ChatConversation, answerer: Answerer, line: str) -> bool:
    """One message or command; whether Ctrl-C stopped its answer."""
    if is_command(line):
        words = conversation.command(line)
        if words:
            screen.note(words)
        return False
    question = without_escape(line)
    with screen.answering() as shown:
        answer = answerer.answer(conversation, question, shown.show)
        shown.finish(answer.text, answer.status)
    conversation.answered(question, answer.text)
    if answer.stopped and not screen.lasting:
        raise KeyboardInterrupt
    return answer.stopped


def _read(stream: Stream, show: Show) -> StreamedAnswer:
    pieces: list[str] = []
    first = None
    stream.watch_reading(lambda tokens, total: show("", f"reading: {tokens:,} of {total:,} tokens"))
    try:
        for piece in stream:
            now = time.monotonic()
            # The time of prefill is no part of the rate, so the first piece only starts the clock.
            began, before = first = first or (now, stream.tokens)
            rate = (stream.tokens - before) / (now - began) if now > began else None
            pieces.append(piece)
            show("".join(pieces).lstrip(), status(stream.tokens, rate, stream.hit_rate))
    except KeyboardInterrupt:
        text = "".join(pieces).strip()
        return StreamedAnswer(text, f"{status(stream.tokens, None, stream.hit_rate)} · stopped", stopped=True)
    assert stream.result is not None
    figures = stream.result.statistics
    line = status(figures.generated_tokens, figures.tokens_per_second, figures.hit_rate)
    cut = " · cut off at --max-tokens" if stream.result.finish_reason == "length" else ""
    return StreamedAnswer("".join(pieces).strip(), line + cut)


def status(tokens: int, rate: float | None, hit_rate: float | None) -> str:
    parts = [f"{tokens} tokens"]
    parts += [] if rate is None else [f"{rate:.1f} tokens/s"]
    parts += [] if hit_rate is None else [f"hit rate {hit_rate:.0%}"]
    return " · ".join(parts)
