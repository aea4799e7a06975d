"""One choice as the text and the tool calls after it, for APIs with items or content blocks. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.http.generation import OutputEvent, Text
from orchestrator.http.openai.request_models import ChatRequest
from orchestrator.http.openai.tool_calls import ToolCallParser


class AnswerContent:
    """The content of the answer to `question`. White space between the text and a call is dropped."""

    def __init__(self, question: ChatRequest) -> None:
        self._parser = ToolCallParser(question.most_calls) if question.offered else None
        self._space = ""

    def parse(self, event: OutputEvent) -> tuple[str, Sequence[Mapping[str, Any]]]:
        """New text, perhaps empty, and the calls; all calls come with the End."""
        if self._parser is None:
            return (event.text if isinstance(event, Text) else ""), ()
        if isinstance(event, Text):
            return self._without_trailing_space(self._parser.push(event.text)), ()
        rest, calls = self._parser.finish()
        return ("" if calls else self._space + rest), calls

    def _without_trailing_space(self, text: str) -> str:
        """Holds white space back until text follows it."""
        text = self._space + text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        return stripped
