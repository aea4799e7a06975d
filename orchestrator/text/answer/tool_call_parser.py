"""Tool calls in the text of an answer. Pure."""

from collections.abc import Sequence

from orchestrator.text.answer.parts import Call, Spoken
from orchestrator.text.answer.tool_syntax import Tools, ToolSyntax
from orchestrator.text.stop_scanner import StopScanner


class ToolCallParser:
    """Splits a text into calls and the text around them. A malformed or incomplete call is text."""

    def __init__(self, syntax: ToolSyntax, tools: Tools, most: int | None) -> None:
        """`most`: number of calls that the client accepts, further ones are dropped; None for any number."""
        self._syntax = syntax
        self._tools = tools
        self._most = most
        self._found = 0
        self._inside = False
        """Behind a start marker."""
        self._content = ""
        """Of the call so far, or white space behind a call."""
        self._behind_call = False
        """Nothing but white space since the last call: it is dropped unless text follows."""
        self._scanner = StopScanner([syntax.start])

    @property
    def inside(self) -> bool:
        """Whether a call was begun that will have an end marker."""
        return self._inside and bool(self._syntax.end)

    def push(self, text: str) -> Sequence[Spoken | Call]:
        parts: list[Spoken | Call] = []
        while True:
            before, found = self._scanner.push(text)
            self._content += before
            if found:
                parts += self._call(self._syntax.end) if self._inside else self._spoken()
                self._cross()
                text = self._scanner.rest
                self._scanner = StopScanner([self._next_marker])
            else:
                return parts if self._inside else [*parts, *self._spoken()]

    def finish(self) -> Sequence[Spoken | Call]:
        """The parts that were held back. What is pushed later is no part of them."""
        self._content += self._scanner.flush()
        inside, self._inside = self._inside, False
        self._scanner = StopScanner([self._syntax.start])
        if not inside:
            return self._spoken()
        return self._call("") if self._syntax.shows_its_end else self._malformed("")

    def _cross(self) -> None:
        """Go behind a marker. Without an end marker, the next start marker ends a call."""
        if not self._inside:
            self._content = ""
        self._inside = not self._inside or not self._syntax.end

    @property
    def _next_marker(self) -> str:
        return self._syntax.end or self._syntax.start if self._inside else self._syntax.start

    def _spoken(self) -> list[Spoken | Call]:
        if self._behind_call and not self._content.strip():
            return []
        self._behind_call = False
        return self._text()

    def _call(self, end: str) -> list[Spoken | Call]:
        found = self._syntax.read(self._content, self._tools)
        if found is None:
            return self._malformed(end)
        calls = found.calls
        self._content = found.rest if found.rest.strip() else ""
        self._behind_call = True
        kept = calls if self._most is None else calls[: max(0, self._most - self._found)]
        self._found += len(calls)
        return [*kept, *self._spoken()]

    def _malformed(self, end: str) -> list[Spoken | Call]:
        self._content = self._syntax.start + self._content + end
        self._behind_call = False
        return self._text()

    def _text(self) -> list[Spoken | Call]:
        text, self._content = self._content, ""
        return [Spoken(text)] if text else []
