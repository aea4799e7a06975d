"""How a family of models writes tool calls, as a value, and reading them. Pure.

`orchestrator.text.families` has the values.
"""

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from orchestrator.text.answer.bound_calls import Marks, Style, StyledCalls
from orchestrator.text.answer.call_stream import LONGEST_HEADER, CallForm, JsonObject, TextFields, Translator
from orchestrator.text.answer.parameters import ALL_TYPES, Parameters, Types, read_as
from orchestrator.text.answer.parts import Arguments, Call
from orchestrator.text.chat_template import ChatTemplate

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""As chat requests of OpenAI's API have them."""


class FoundCalls(NamedTuple):
    """Calls between two markers, and the text behind them that belongs to none."""

    calls: Sequence[Call]
    rest: str


class ReadParts(NamedTuple):
    """As FoundCalls, of which some parts were returned before."""

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


def in_order(*marks: str) -> Callable[[str], bool]:
    """For `CallSyntax.well_formed`: the last mark of each kind stands in this order.

    In another order, mlx-lm's parser searches each earlier mark's end in vain.
    """

    def ordered(content: str) -> bool:
        last = [content.rfind(mark) for mark in marks]
        return last == sorted(last)

    return ordered


_RAISED = (ValueError, ArithmeticError, TypeError, LookupError, AttributeError, SyntaxError, RuntimeError, MemoryError)
"""What the parsers raise for malformed calls, which models do write."""


@dataclass(frozen=True)
class CallSyntax:
    """How the models of a family write tool calls."""

    name: str
    """That of mlx-lm's parser, which reads the calls unless there is a `reader`."""
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
    reader: Callable[[str], tuple[list[Any], str]] | None = None
    """From the text between two markers to objects with `name` and `arguments`, and the text behind the calls. Raises
    ValueError or LookupError."""
    text_arguments: bool = False
    """Arguments are texts without quotes."""
    values: tuple[tuple[str, str], ...] = (('"', '"'),)
    """What begins a value and what ends it. In a value, markers are text."""
    tagged: bool = False
    """Its markers are tags, as texts have them: outside a section, a call begins a line and is in no block of code."""
    well_formed: Callable[[str], bool] = in_order()
    """False for what a parser would read too loosely, or search again and again for what is not there."""
    without_end: Callable[[str], Iterable[tuple[str, str]]] | None = None
    """Where the end marker is missing: contents that may be complete, the best first, with the text behind each. None:
    the whole content, which ends with a value where values have tags."""
    forms: tuple[CallForm, ...] = ()
    """Calls that can be read while they are written; others are read at their end."""
    translator: Callable[[], Translator] | None = None
    """To what `forms` read."""
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

    @property
    def readable(self) -> bool:
        """Whether the installed mlx-lm has the parser, if that reads the calls."""
        return self.reader is not None or importlib.util.find_spec(f"{_mlx_parsers()}.{self.name}") is not None

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
        if self.description is None or style is None or template.knows_tools:
            return None
        return partial(self.description, style)

    def _style_of(self, template: ChatTemplate) -> Style | None:
        return next((style for text, style in self.styles if template.mentions(text)), self.style)

    def read_cut(self, content: str, tools: Tools) -> FoundCalls | None:
        """What stands behind a start marker whose end marker is missing; None if it has no complete call."""
        tags = tuple(end for _, end in self.values if end.startswith("</"))
        if tags and not content.rstrip().endswith(tags):
            return None
        for whole, behind in self.without_end(content) if self.without_end else ((content, ""),):
            if found := self.read(whole, tools):
                return found._replace(rest=found.rest + behind)
        return None

    def read(self, content: str, tools: Tools) -> FoundCalls | None:
        """What stands between two markers; None if it is malformed."""
        if not self.well_formed(content):
            return None
        offered = {tool["function"]["name"] for tool in tools}
        try:
            found, rest = self._read(content, tools, offered)
            calls = [Call(one.name, _written(one.arguments), one.id) for one in msgspec.convert(found, list[_Call])]
        except _RAISED:
            return None
        return FoundCalls(calls, rest) if calls and all(call.name in offered for call in calls) else None

    def _read(self, content: str, tools: Tools, offered: set[str]) -> tuple[list[Any], str]:
        if self.reader is not None:
            return self.reader(content)
        if content.strip() in offered:
            return [{"name": content.strip(), "arguments": {}}], ""
        known = [_with_types(tool) for tool in tools]
        # These parsers read a whole section of calls; each call is returned when it is complete.
        read = f"{self.start}{content}{self.end}" if self.section and not self.start.endswith(">") else content
        found = importlib.import_module(f"{_mlx_parsers()}.{self.name}").parse_tool_call(read, known)
        calls = found if isinstance(found, list) else [found]
        return [_as_types(call, tools) for call in calls] if self.text_arguments else calls, ""


class CallLimit:
    """The calls of an answer that the client accepts."""

    def __init__(self, most: int | None) -> None:
        """None for any number."""
        self._most = most
        self._found = 0

    def kept(self, parts: Sequence[Call | Arguments]) -> Sequence[Call | Arguments]:
        if self._most is None:
            return parts
        kept: list[Call | Arguments] = []
        for part in parts:
            self._found += isinstance(part, Call)
            if self._found <= self._most:
                kept.append(part)
        return kept


class CallStream:
    """Reads the calls between two markers while they are written, if their functions are offered."""

    def __init__(self, syntax: CallSyntax, tools: Tools) -> None:
        self._syntax = syntax
        self._tools = tools
        self._functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._translator = syntax.translator and syntax.translator()
        self._whole: list[str] = []
        """What was pushed before the first call."""
        self._held = ""
        self._tail = ""
        self._reader: JsonObject | TextFields | None = None
        self._begun = False

    @property
    def content(self) -> str:
        """All of it, while no call was begun."""
        return "".join(self._whole)

    def push(self, text: str) -> Sequence[Call | Arguments]:
        if not self._begun:
            self._whole.append(text)
        return self._read(self._translator.push(text) if self._translator else text)

    def finish(self, *, marked: bool) -> ReadParts | FoundCalls | None:
        """The last parts, and the text behind them; None without calls. `marked`: the end marker was there."""
        parts = [*self._read(self._translator.finish() if self._translator else "")]
        if self._reader is not None:
            parts.append(Arguments(self._reader.close(marked=marked), last=True))
            self._held = self._reader.rest or ""
        if self._begun:
            rest = self._held[self._behind(self._held) :]
            return ReadParts(parts, "" if self._syntax.end.startswith(rest.strip()) else rest)
        whole = self.content
        return self._syntax.read(whole, self._tools) if marked else self._syntax.read_cut(whole, self._tools)

    def _read(self, text: str) -> Sequence[Call | Arguments]:
        parts: list[Call | Arguments] = []
        while self._reader is not None or (text := self._begin(text, parts)):
            assert self._reader is not None
            piece = self._reader.push(text)
            done = self._reader.rest is not None
            match parts[-1] if parts else None:
                case Call(name, "", id, more=True):
                    parts[-1] = Call(name, piece, id, more=not done)
                case _ if piece or done:
                    parts.append(Arguments(piece, last=done))
                case _:
                    pass
            if not done:
                break
            text, self._reader = self._reader.rest or "", None
        return parts

    def _begin(self, text: str, parts: list[Call | Arguments]) -> str:
        """Begins a call, if its header is complete. Returns what stands behind that."""
        self._held += text
        begin = self._behind(self._held)
        for form in self._syntax.forms:
            found = form.header.match(self._held[: begin + LONGEST_HEADER], begin)
            function = found and self._functions.get(found["name"])
            if found and function:
                header, text, self._held = found[0], self._held[found.end() :], ""
                self._begun, self._tail = True, form.tail
                self._reader = (
                    TextFields(form.fields, self._syntax.end, function, partial(self._field, header))
                    if form.fields
                    else JsonObject()
                )
                parts.append(Call(function["name"], "", found.groupdict().get("id"), more=True))
                return text
        return ""

    def _behind(self, text: str) -> int:
        """Where the tail of the call before ends."""
        found = re.match(self._tail, text)
        return found.end() if found else 0

    def _field(self, header: str, field: str) -> str | None:
        """The JSON object of one argument."""
        found = self._syntax.read(header + field, self._tools)
        return found.calls[0].arguments if found else None


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}
    id: str | None = None


@cache
def _mlx_parsers() -> str:
    """The name of the package of mlx-lm's parsers, which is loaded without mlx-lm: it needs neither MLX nor a model."""
    found = importlib.util.find_spec("mlx_lm")
    assert found is not None
    folder = Path(next(iter(found.submodule_search_locations or ()))) / "tool_parsers"
    spec = importlib.util.spec_from_file_location(
        "orchestrator_mlx_tool_parsers", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    return spec.name


def _written(arguments: dict[str, Any]) -> str:
    """As JSON. Raises ValueError or TypeError for values that it does not have."""
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Half a pair of surrogates has no encoding.
    written.encode()
    return written


def _with_types(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tool with one type for each parameter, by which a parser takes the text as it is or reads a value."""
    parameters = Parameters(tool["function"])
    properties = {name: _parsed_type(parameters.types(schema)) for name, schema, _ in parameters.members()}
    return {**tool, "function": {**tool["function"], "parameters": {"properties": properties}}}


def _parsed_type(types: Types) -> Mapping[str, Any]:
    if types == ALL_TYPES:
        return {}
    if "string" in types:
        return {"type": "string"}
    return {"type": "boolean" if types == {"boolean"} else "object"}


def _as_types(call: Any, tools: Tools) -> Any:
    function = next((tool["function"] for tool in tools if tool["function"]["name"] == call["name"]), None)
    if function is None:
        return call
    parameters = Parameters(function)
    types = {name: parameters.types(schema) for name, schema, _ in parameters.members()}
    arguments = {name: read_as(value, types.get(name, ALL_TYPES)) for name, value in call["arguments"].items()}
    return {**call, "arguments": arguments}
