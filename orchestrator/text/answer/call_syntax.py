"""How a family of models writes tool calls, as a value, and reading them. Pure.

`orchestrator.text.families` has the values.
"""

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from orchestrator.text.answer.bound_calls import Marks, Style, StyledCalls
from orchestrator.text.answer.parameters import ALL_TYPES, Parameters, Types, read_as
from orchestrator.text.answer.parts import Call
from orchestrator.text.chat_template import ChatTemplate

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""As chat requests of OpenAI's API have them."""


class FoundCalls(NamedTuple):
    """Calls between two markers, and the text behind them that belongs to none."""

    calls: list[Call]
    rest: str


def as_it_is(content: str) -> Iterable[tuple[str, str]]:
    """For `CallSyntax.without_end`: a call may be complete without its end marker."""
    return ((content, ""),)


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
    name_alone: bool = False
    """A call without arguments is the name of its function, which mlx-lm's parser does not read."""
    offered_only: bool = False
    """Only calls of offered functions are calls: the parser makes one of any text, or others use these markers too."""
    well_formed: Callable[[str], bool] = in_order()
    """False for what a parser would read too loosely, or search again and again for what is not there."""
    without_end: Callable[[str], Iterable[tuple[str, str]]] | None = None
    """Where the end marker is missing: contents that may be complete, the best first, with the text behind each. None:
    a call is complete only with the marker."""
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
        if self.description is None or style is None or (template.knows_tools and self.shown_by(template)):
            return None
        return partial(self.description, style)

    def _style_of(self, template: ChatTemplate) -> Style | None:
        return next((style for text, style in self.styles if template.mentions(text)), self.style)

    def read_cut(self, content: str, tools: Tools) -> FoundCalls | None:
        """What stands behind a start marker whose end marker is missing; None if it has no complete call."""
        for whole, behind in self.without_end(content) if self.without_end else ():
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
        known = not self.offered_only or all(call.name in offered for call in calls)
        return FoundCalls(calls, rest) if calls and known else None

    def _read(self, content: str, tools: Tools, offered: set[str]) -> tuple[list[Any], str]:
        if self.reader is not None:
            return self.reader(content)
        if self.name_alone and content.strip() in offered:
            return [{"name": content.strip(), "arguments": {}}], ""
        known = [_with_types(tool) for tool in tools]
        # These parsers read a whole section of calls; each call is returned when it is complete.
        read = f"{self.start}{content}{self.end}" if self.section else content
        found = importlib.import_module(f"{_mlx_parsers()}.{self.name}").parse_tool_call(read, known)
        calls = found if isinstance(found, list) else [found]
        return [_as_types(call, tools) for call in calls] if self.text_arguments else calls, ""


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
