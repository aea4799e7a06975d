"""How a family of models writes tool calls, as a value, and reading them. Pure.

`orchestrator.text.families` has the values.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from orchestrator.text.answer.bound_calls import Marks, Style, StyledCalls
from orchestrator.text.answer.call_stream import LONGEST_HEADER, ArgumentsReader, CallForm
from orchestrator.text.answer.parts import Arguments, Call
from orchestrator.text.chat_template import ChatTemplate

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""As chat requests of OpenAI's API have them."""


class FoundCalls(NamedTuple):
    """The last parts of the calls between two markers, and the text behind them that belongs to none."""

    calls: Sequence[Call | Arguments]
    rest: str


LONGEST_HEAD = 256
"""Characters in which the name of a call's function stands."""
_BEFORE_NAMES = r"(?:\W|(?:names?|functions?|tools?|calls?|index|type|id|sep|\d+)(?!\w))*"


def beginning_of_calls(tools: Tools) -> re.Pattern[str]:
    """Matches what may be the beginning of a call behind its start marker; `name` is in it once that is certain."""
    names = "|".join(re.escape(tool["function"]["name"]) for tool in tools)
    name = rf"(?:functions\.)?(?:{names}|arguments|parameters)(?![\w.-]|\Z)"
    return re.compile(rf"{_BEFORE_NAMES}(?:(?P<name>{name})|[\w.-]*\Z)")


class Values:
    """Whether the text of a call ends inside a value, in which markers are text."""

    def __init__(self, values: Sequence[tuple[str, str]]) -> None:
        self._ends = dict(values)
        self._pattern = re.compile("|".join([r"\\[\\\"']", *map(re.escape, {*self._ends, *self._ends.values()})]))
        self._end = ""

    def push(self, text: str) -> bool:
        """Whether what was pushed so far, which ends before a marker, ends inside a value."""
        for mark in self._pattern.findall(text):
            self._end = "" if mark == self._end else self._end or self._ends.get(mark, "")
        return bool(self._end)


@dataclass(frozen=True)
class CallSyntax:
    """How the models of a family write tool calls."""

    name: str
    start: str
    end: str
    """Empty: a call ends where the next one begins, or with the answer."""
    section: tuple[str, str] | None = None
    """Markers around all calls, in syntaxes that have them. Calls without them count too."""
    inner_markers: tuple[str, ...] = ()
    """Further markers that are special tokens in some models."""
    template_marks: tuple[tuple[str, ...], ...] | None = None
    """A template shows this syntax if one of these groups is in it completely. None: if its first marker is."""
    fallback_sign: Callable[[ChatTemplate], bool] | None = None
    """Another way to know it, for a template that shows no syntax."""
    settings_names: tuple[str, ...] = ()
    """Names that a model's settings may have for it; empty for `name`."""
    forms: tuple[CallForm, ...] = ()
    """Calls that are read while they are written. JSON in another form is read at its end."""
    translator: Callable[[], Callable[[str], str]] = lambda: str
    """Makes what turns an output, piece by piece, into what `forms` read."""
    values: tuple[tuple[str, str], ...] = (('"', '"'),)
    """What begins a value and what ends it. In a value, markers are text."""
    tagged: bool = False
    """Its markers are tags, as texts have them: outside a section, a call begins a line and is in no block of code."""
    style: Style | None = None
    """How grammars write it; None for calls that can't be bound."""
    styles: tuple[tuple[str, Style], ...] = ()
    """Styles of some models, each with a text by which their templates show it."""
    description: Callable[[Style, Tools], str] | None = None
    """Of the tools, where templates show calls and results but leave the tools to the system message."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Markers that may be special tokens, whose text must be shown to be parsed."""
        return tuple(filter(None, (*(self.section or ()), self.start, self.end, *self.inner_markers)))

    def shown_by(self, template: ChatTemplate) -> bool:
        groups = (self.tokens[:1],) if self.template_marks is None else self.template_marks
        return any(all(template.mentions(mark) for mark in group) for group in groups)

    def writer(self, template: ChatTemplate) -> StyledCalls | None:
        """None for a syntax whose calls can't be bound."""
        style = self._style_of(template)
        return None if style is None else StyledCalls(style, Marks.of(self.tokens, template.codec))

    def describer(self, template: ChatTemplate) -> Callable[[Tools], str] | None:
        """Describes tools to a model whose template does not."""
        style = self._style_of(template)
        if self.description is None or style is None or (template.knows_tools and self.shown_by(template)):
            return None
        return partial(self.description, style)

    def _style_of(self, template: ChatTemplate) -> Style | None:
        return next((style for text, style in self.styles if template.mentions(text)), self.style)


class CallLimit:
    """The calls of an answer that the client accepts."""

    def __init__(self, most: int | None) -> None:
        """None for any number."""
        self._most = most
        self._found = 0

    def kept(self, parts: Sequence[Call | Arguments]) -> Sequence[Call | Arguments]:
        kept: list[Call | Arguments] = []
        for part in parts:
            self._found += isinstance(part, Call)
            if self._most is None or self._found <= self._most:
                kept.append(part)
        return kept


class CallStream:
    """Reads the calls of offered functions between two markers while they are written."""

    def __init__(self, syntax: CallSyntax, tools: Tools) -> None:
        self._syntax = syntax
        self._functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._translated = syntax.translator()
        self.content = ""
        """All of it, while no call was begun."""
        self._held = ""
        self._tail = ""
        self._reader: ArgumentsReader | None = None
        self._begun = False

    def push(self, text: str) -> Sequence[Call | Arguments]:
        if not self._begun:
            self.content += text
        return self._read(self._translated(text))

    def finish(self, *, marked: bool) -> FoundCalls | None:
        """None without calls. `marked`: the end marker was there."""
        parts: list[Call | Arguments] = []
        if self._reader is not None:
            parts.append(Arguments(self._reader.close(marked=marked), last=True))
            self._held = self._reader.rest or ""
        if not self._begun:
            return self._unformed(marked=marked)
        rest = self._held[self._behind(self._held) :]
        return FoundCalls(parts, "" if self._syntax.end.startswith(rest.strip()) else rest)

    def _read(self, text: str) -> Sequence[Call | Arguments]:
        parts: list[Call | Arguments] = []
        while self._reader is not None or (text := self._begin(text, parts)):
            assert self._reader is not None
            piece, rest = self._reader.push(text), self._reader.rest
            if piece or rest is not None:
                parts.append(Arguments(piece, last=rest is not None))
            if rest is None:
                break
            text, self._reader = rest, None
        return parts

    def _begin(self, text: str, parts: list[Call | Arguments]) -> str:
        """Begins a call, if its header is complete. Returns what stands behind that."""
        self._held += text
        begin = self._behind(self._held)
        for form in self._syntax.forms:
            found = form.header.match(self._held[: begin + LONGEST_HEADER], begin)
            function = found and self._functions.get(found["name"])
            if found and function:
                text, self._held = self._held[found.end() :], ""
                self._begun, self._tail = True, form.tail
                self._reader = form.arguments(function, self._syntax.end)
                parts.append(Call(function["name"], "", found.groupdict().get("id")))
                return text
        return ""

    def _behind(self, text: str) -> int:
        """Where the tail of the call before ends."""
        found = re.match(self._tail, text)
        return found.end() if found else 0

    def _unformed(self, *, marked: bool) -> FoundCalls | None:
        """A call without arguments, or JSON in another order."""
        content = self.content.rstrip()
        for form in self._syntax.forms if marked or not self._syntax.end else ():
            found = form.header.match(content + form.alone) if form.alone else None
            if found and found.end() == len(content) and found["name"] in self._functions:
                return FoundCalls([Call(found["name"], "{}"), Arguments("", last=True)], "")
        try:
            calls, rest = _json_calls(self._syntax.start * self._syntax.start.startswith("{") + content.lstrip())
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None
        parts = [part for call in calls for part in (call, Arguments("", last=True))]
        return FoundCalls(parts, rest) if calls and all(call.name in self._functions for call in calls) else None


def _json_calls(text: str) -> tuple[list[Call], str]:
    """Calls that are an object or a list of them. Models forget the last brace, or write one more."""
    found, end = json.JSONDecoder(strict=False).raw_decode(text + "}")
    calls: list[Call] = []
    for one in found if isinstance(found, list) else [found]:
        arguments = one["arguments"] if "arguments" in one else one.get("parameters", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append(Call(one["name"], json.dumps(dict(arguments), allow_nan=False), one.get("id")))
    return calls, text[end:].lstrip("} \n;")
