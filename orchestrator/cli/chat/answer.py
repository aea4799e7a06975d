"""One answer as it comes: text, how fast, and what it says when it is stopped or refused. Knows no terminal."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from orchestrator.api.client import Client, Stream
from orchestrator.cli.chat.conversation import ChatConversation
from orchestrator.text.chat_template import ChatTemplate

Show = Callable[[str, str], None]
"""The answer so far, and the status line."""


@dataclass(frozen=True)
class StreamedAnswer:
    text: str
    status: str
    stopped: bool = False
    """By the user; the pipeline was told."""


@dataclass(frozen=True)
class Answerer:
    """Asks the pipeline behind `client`, whose conversations look like `template`'s."""

    client: Client
    template: ChatTemplate

    def answer(self, conversation: ChatConversation, question: str, show: Show) -> StreamedAnswer:
        """Raises PipelineError if the pipeline refuses; nothing of the conversation has changed then."""
        params = conversation.params
        stops = [params.stop] if isinstance(params.stop, str) else list(params.stop)
        params = structs.replace(params, stop=[*stops, *self.template.stops])
        tokens = self.template.tokens(conversation.messages(question))
        with self.client.stream(tokens, params) as stream:
            return _read(stream, show)


def _read(stream: Stream, show: Show) -> StreamedAnswer:
    pieces: list[str] = []
    first = None
    try:
        for piece in stream:
            now = time.monotonic()
            # The prompt's own time is none of decoding; the first piece only starts the clock.
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
