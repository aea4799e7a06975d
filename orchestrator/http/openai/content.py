"""What one choice says as clients of item-wise APIs are told it: a text, and calls behind it. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.http.generation import OutputEvent, Text
from orchestrator.http.openai.request_models import ChatRequest
from orchestrator.http.openai.tool_calls import ToolCallParser


class AnswerContent:
    """Of the answer to `question`. Space between the text and a call belongs to neither."""

    def __init__(self, question: ChatRequest) -> None:
        self._caller = ToolCallParser(question.most_calls) if question.offered else None
        self._space = ""

    def told(self, event: OutputEvent) -> tuple[str, Sequence[Mapping[str, Any]]]:
        """More text, perhaps none; and all calls, which come with the end."""
        if self._caller is None:
            return (event.text if isinstance(event, Text) else ""), ()
        if isinstance(event, Text):
            return self._behind_space(self._caller.push(event.text)), ()
        rest, calls = self._caller.finish()
        return ("" if calls else self._space + rest), calls

    def _behind_space(self, text: str) -> str:
        """Keeps space back until something follows it."""
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        return said
