"""Tool calls in the text of an answer. Pure."""

from collections.abc import Sequence

from orchestrator.text.answer.parts import Call, Spoken
from orchestrator.text.answer.tool_syntax import Found, Tools, ToolSyntax
from orchestrator.text.stop_scanner import StopScanner


class ToolCallParser:
    """Splits a text into calls and the text around them. A malformed or incomplete call is text.

    Markers around a section of calls are dropped, unless no call is in it.
    """

    def __init__(self, syntax: ToolSyntax, tools: Tools, most: int | None) -> None:
        """`most`: number of calls that the client accepts, further ones are dropped; None for any number."""
        self._syntax = syntax
        self._tools = tools
        self._most = most
        self._found = 0
        self._section_start, self._section_end = syntax.section or ("", "")
        self._in_section = False
        self._in_call = False
        """Behind a start marker."""
        self._content = ""
        """Of the call so far, or what may be dropped: white space behind a call, or a section's start."""
        self._before = ""
        """What is dropped before the call if that is complete."""
        self._behind_call = False
        """Nothing but white space since the last call: it is dropped unless text follows."""
        self._scanner = StopScanner(self._markers)

    @property
    def inside(self) -> bool:
        """Whether a call was begun that will have an end marker."""
        return (self._in_call or self._in_section) and bool(self._syntax.end)

    def push(self, text: str) -> Sequence[Spoken | Call]:
        parts: list[Spoken | Call] = []
        while True:
            before, found = self._scanner.push(text)
            self._content += before
            if not found:
                return parts if self._in_call else [*parts, *self._spoken()]
            parts += self._cross(self._scanner.found)
            text = self._scanner.rest
            self._scanner = StopScanner(self._markers)

    def finish(self) -> Sequence[Spoken | Call]:
        """The parts that were held back. What is pushed later is no part of them."""
        self._content += self._scanner.flush()
        in_call, self._in_call, self._in_section = self._in_call, False, False
        self._scanner = StopScanner(self._markers)
        if not in_call:
            return self._spoken()
        return self._call(self._syntax.read_cut(self._content, self._tools), "")

    @property
    def _markers(self) -> Sequence[str]:
        if self._in_call:
            return [self._syntax.end or self._syntax.start]
        return [self._syntax.start, self._section_end if self._in_section else self._section_start]

    def _cross(self, marker: str | None) -> list[Spoken | Call]:
        """Go behind a marker. Without an end marker, the next start marker ends a call and begins one."""
        if self._in_call:
            self._in_call = not self._syntax.end
            return self._call(self._syntax.read(self._content, self._tools), self._syntax.end)
        if self._in_section and marker == self._section_end:
            self._in_section = False
            if not self._behind_call or self._content.strip():
                self._content += self._section_end
            return self._spoken()
        parts = self._spoken()
        if marker == self._syntax.start:
            self._in_call = True
            self._before, self._content = "" if self._behind_call else self._content, ""
        else:
            self._in_section, self._behind_call = True, False
            self._content = self._section_start
        return parts

    def _spoken(self) -> list[Spoken | Call]:
        """The text so far, unless a call may follow before which it is dropped."""
        begun = self._in_section and not self._content.removeprefix(self._section_start).strip()
        if begun or (self._behind_call and not self._content.strip()):
            return []
        self._behind_call = False
        return self._text()

    def _call(self, found: Found | None, end: str) -> list[Spoken | Call]:
        before, self._before = self._before, ""
        if found is None:
            self._content = before + self._syntax.start + self._content + end
            self._behind_call = False
            return self._text()
        calls = found.calls
        self._content = found.rest if found.rest.strip() else ""
        self._behind_call = True
        kept = calls if self._most is None else calls[: max(0, self._most - self._found)]
        self._found += len(calls)
        return [*kept, *self._spoken()]

    def _text(self) -> list[Spoken | Call]:
        text, self._content = self._content, ""
        return [Spoken(text)] if text else []
