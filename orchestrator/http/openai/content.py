"""The parts of one choice, for APIs with items or content blocks. Pure."""

import uuid
from collections.abc import Sequence
from typing import Any

from orchestrator.http.generation import OutputEvent, Text
from orchestrator.text.answer.parts import AnswerParser, Call, Part, Spoken, ThoughtSpan


class AnswerContent:
    """The content of an answer. White space between the text and a call is dropped."""

    def __init__(self, parser: AnswerParser, calls: bool) -> None:
        """`calls`: whether the answer may have any."""
        self._parser = parser
        self._calls = calls
        self._called = False
        self._space = ""

    @property
    def thoughts(self) -> Sequence[ThoughtSpan]:
        """As of AnswerParser."""
        return self._parser.thoughts

    def parse(self, event: OutputEvent) -> Sequence[Part]:
        """The new parts."""
        parts = self._parser.push(event.text) if isinstance(event, Text) else self._parser.finish()
        if not self._calls:
            return parts
        kept = [kept for part in parts for kept in self._without_trailing_space(part)]
        if isinstance(event, Text) or self._called or not self._space:
            return kept
        return [*kept, Spoken(self._space)]

    def _without_trailing_space(self, part: Part) -> list[Part]:
        """Holds white space back until text follows it."""
        if not isinstance(part, Spoken):
            self._called = self._called or isinstance(part, Call)
            self._space = ""
            return [part]
        text = self._space + part.text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        return [Spoken(stripped)] if stripped else []


def chat_call(call: Call) -> dict[str, Any]:
    """A call in the form of chat responses, with a new id if the model gave it none. Mistral's templates read only ids
    of nine letters and digits."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id or uuid.uuid4().hex[:9], "type": "function", "function": function}
