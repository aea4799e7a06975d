"""Grammars of calls of a request's functions: demanded, optional, or instead of a value. Pure.

`_STYLES` says how each syntax frames a call; gpt-oss' format is `HarmonyCalls`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from orchestrator.text.answer.bound_calls.arguments import (
    ArgumentsWriter,
    BareObject,
    Fields,
    JsonArguments,
    Marks,
    PythonArguments,
)
from orchestrator.text.answer.harmony import HARMONY_TOKENS
from orchestrator.text.answer.parameters import ANY_OBJECT, Function, Parameters, json_schema
from orchestrator.text.answer.tool_syntax import ToolSyntax
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import InputError
from protocol.messages.base import MAX_SCHEMA
from protocol.messages.grammar import Calls, Form, Grammar, Json, OneOf, Several, Text
from protocol.sampling.schema_bounds import MOST_LEVELS, surely_longer

Functions: TypeAlias = Sequence[Function]
_LONGEST_NAME = 256
_MOST_CALLS = 64
"""Of one answer, in a syntax that numbers them."""


class CallWriter(Protocol):
    """Makes grammars of calls in one model's syntax. All methods raise InputError."""

    def demanded(self, functions: Functions, *, several: bool) -> Grammar:
        """Calls and nothing else: one, or several."""
        ...

    def optional(self, functions: Functions) -> Grammar:
        """Any text, and calls in it if the model likes."""
        ...

    def or_value(self, functions: Functions, schema: str, *, several: bool) -> Grammar:
        """Calls and nothing else, or a JSON value."""
        ...


class Style(NamedTuple):
    """How one model writes calls."""

    arguments: ArgumentsWriter | None = JsonArguments()
    """None: a call is a JSON object with the name and the arguments."""
    opening: str = ""
    start: str = ""
    before: str = ""
    behind: str = ""
    """What stands around the name of the function, before its arguments."""
    quoted: bool = False
    """The name is a JSON string."""
    after: str = ""
    separator: str = ""
    closing: str = ""
    numbered: bool = False
    """Behind the name stands the number of the call, from 0."""


class StyledCalls:
    """Calls of a style, in a model with these markers."""

    def __init__(self, style: Style, marks: Marks) -> None:
        self._style = style
        self._marks = marks

    def demanded(self, functions: Functions, *, several: bool) -> Grammar:
        return Grammar("", self._calls(functions, repeats=several))

    def optional(self, functions: Functions) -> Grammar:
        # Optional calls come behind any text, each of them. Only behind an opening do they follow one another.
        return Grammar("", self._calls(functions, repeats=bool(self._style.opening), optional=True))

    def or_value(self, functions: Functions, schema: str, *, several: bool) -> Grammar:
        if (self._style.opening or self._style.start).startswith("{"):
            raise InputError("This model's calls are JSON too: leave out tools or response_format.")
        return Grammar(schema, self._calls(functions, repeats=several))

    def _calls(self, functions: Functions, *, repeats: bool, optional: bool = False) -> Calls:
        require_small(functions)
        style, marks = self._style, self._marks
        forms = [self._whole(functions)] if style.arguments is None else [self._form(one) for one in functions]
        return bounded(
            Calls(
                tuple((*form, *marks.form(style.after)) for form in forms),
                *map(marks.form, (style.opening, style.start, style.separator, style.closing)),
                repeats=repeats,
                optional=optional,
                letters=next((mark for mark in marks.tokens if (style.opening or style.start).startswith(mark)), ""),
            )
        )

    def _form(self, function: Function) -> Form:
        style, marks, name = self._style, self._marks, function["name"]
        assert style.arguments is not None
        return (
            *marks.form(style.before),
            json.dumps(name) if style.quoted else name,
            *((OneOf(tuple((f":{number}",) for number in range(_MOST_CALLS))),) if style.numbered else ()),
            *marks.form(style.behind),
            *style.arguments.form(Parameters(function), marks),
        )

    def _whole(self, functions: Functions) -> Form:
        lenient = not any(function.get("strict") for function in functions)
        whole = {"anyOf": [_whole_call(place, function) for place, function in enumerate(functions)]}
        return (Json(json_schema(whole, lenient=lenient)),)


_DEEPSEEK = Style(
    opening="<｜tool▁calls▁begin｜>",
    start="<｜tool▁call▁begin｜>",
    behind="<｜tool▁sep｜>",
    after="<｜tool▁call▁end｜>",
    closing="<｜tool▁calls▁end｜>",
)
_STYLES = {
    # As in the chat templates of Qwen and Hermes models.
    "json": Style(None, start="<tool_call>\n", after="\n</tool_call>", separator="\n"),
    "llama3": Style(start='{"name":', before=" ", behind=', "parameters": ', quoted=True, after="}", separator="\n"),
    "mistral": Style(start="[TOOL_CALLS]", behind="[ARGS]"),
    "older mistral": Style(None, opening="[TOOL_CALLS] [", separator=", ", closing="]"),
    "deepseek": _DEEPSEEK,
    "deepseek block": _DEEPSEEK._replace(
        before="function<｜tool▁sep｜>", behind="\n```json\n", after="\n```<｜tool▁call▁end｜>", separator="\n"
    ),
    "kimi_k2": Style(
        opening="<|tool_calls_section_begin|>",
        start="<|tool_call_begin|>",
        before="functions.",
        numbered=True,
        behind="<|tool_call_argument_begin|>",
        after="<|tool_call_end|>",
        closing="<|tool_calls_section_end|>",
    ),
    "qwen3_coder": Style(
        Fields("<parameter=", ">\n", "</parameter>", gap="\n", after="\n", never=("</tool_call>",)),
        start="<tool_call>\n",
        before="<function=",
        behind=">\n",
        after="</function>\n</tool_call>",
        separator="\n",
    ),
    "glm47": Style(
        Fields("<arg_key>", "</arg_key><arg_value>", "</arg_value>", never=("</tool_call>",)),
        start="<tool_call>",
        after="</tool_call>",
    ),
    # GLM 4.5 and 4.6.
    "glm47 lines": Style(
        Fields("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", after="\n", never=("</tool_call>",)),
        start="<tool_call>",
        behind="\n",
        after="</tool_call>",
        separator="\n",
    ),
    "longcat": Style(
        Fields(
            "<longcat_arg_key>",
            "</longcat_arg_key>\n<longcat_arg_value>",
            "</longcat_arg_value>",
            after="\n",
            never=("</longcat_tool_call>",),
        ),
        start="<longcat_tool_call>",
        behind="\n",
        after="</longcat_tool_call>",
        separator="\n",
    ),
    "minimax_m2": Style(
        Fields('<parameter name="', '">', "</parameter>", after="\n", never=("</invoke>", "</minimax:tool_call>")),
        opening="<minimax:tool_call>\n",
        start='<invoke name="',
        behind='">\n',
        # As a separator, the line break would be taken for the beginning of `closing`.
        after="</invoke>\n",
        closing="</minimax:tool_call>",
    ),
    "minicpm5": Style(
        Fields('<param name="', '">', "</param>", never=("</function>",)),
        start='<function name="',
        behind='">',
        after="</function>",
    ),
    "gemma4": Style(
        BareObject('<|"|>', never=("<tool_call|>",)), start="<|tool_call>", before="call:", after="<tool_call|>"
    ),
    "function_gemma": Style(
        BareObject("<escape>", never=("}", "<end_function_call>"), flat=True),
        start="<start_function_call>",
        before="call:",
        after="<end_function_call>",
    ),
    "pythonic": Style(PythonArguments(), opening="<|tool_call_start|>[", separator=", ", closing="]<|tool_call_end|>"),
}


def call_writer(syntax: ToolSyntax, template: ChatTemplate) -> CallWriter | None:
    """None for a syntax whose calls can't be bound."""
    style = _STYLES.get(_variant(syntax.name, template))
    return None if style is None else StyledCalls(style, Marks.of(syntax.tokens, template.codec))


JSON_CALLS = StyledCalls(_STYLES["json"], Marks({}))
"""`<tool_call>` and JSON, of a model in which these markers are no tokens."""


def _variant(name: str, template: ChatTemplate) -> str:
    """Some syntaxes are written in two ways."""
    match name:
        case "mistral" if not template.mentions("[ARGS]"):
            return "older mistral"
        case "deepseek" if template.mentions("```json"):
            return "deepseek block"
        # In a template's source, the line break may be an escape.
        case "glm47" if any(template.mentions(f"</arg_key>{line}<arg_value>") for line in ("\n", "\\n")):
            return "glm47 lines"
    return name


def require_small(functions: Functions) -> None:
    """Raises InputError for schemas longer than a grammar may be, before anything is made of them."""
    if surely_longer([function.get("parameters") for function in functions], MAX_SCHEMA):
        raise InputError(f"The schema in tools is too long: the limit is {MAX_SCHEMA:,} characters.")


def bounded(calls: Calls) -> Calls:
    """Raises InputError for more than a grammar may hold."""
    size = sum(map(_size, (*calls.forms, calls.opening)))
    if size > MAX_SCHEMA:
        raise InputError(f"The schema in tools has {size:,} characters; the limit is {MAX_SCHEMA:,}.")
    return calls


def _size(form: Form) -> int:
    """Characters of schemas and of names and values, which are all that a request makes long."""
    size = 0
    for part in form:
        match part:
            case Json():
                size += len(part.schema)
            case str():
                size += len(part)
                if len(part) > _LONGEST_NAME:
                    raise InputError(
                        f"A name or value in tools has {len(part):,} characters; the limit is {_LONGEST_NAME}."
                    )
            case OneOf():
                size += sum(map(_size, part.forms))
            case Several():
                size += _size(part.form)
            case _:
                size += 1
    return size


def _whole_call(place: int, function: Function) -> Mapping[str, Any]:
    parameters = function.get("parameters") or ANY_OBJECT
    arguments = _relocated(parameters, f"#/anyOf/{place}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _relocated(schema: Any, root: str, level: int = 0) -> Any:
    """The schema as part of another one: its references to itself begin with `root`."""
    if level > MOST_LEVELS:
        raise InputError(f"The schema in tools is nested deeper than {MOST_LEVELS} levels.")
    if isinstance(schema, list | tuple):
        return [_relocated(one, root, level + 1) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: root + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _relocated(value, root, level + 1)
        for name, value in schema.items()
    }


_MESSAGE, _NEXT = "<|message|>", "<|start|>assistant"


class HarmonyCalls:
    """Of a model with these tokens. The prompt ends with `<|start|>assistant`."""

    def __init__(self, codec: TextCodec) -> None:
        self._marks = Marks.of(HARMONY_TOKENS, codec)

    def demanded(self, functions: Functions, *, several: bool) -> Grammar:
        """`several` has no effect."""
        return self._grammar(self._calls(functions))

    def optional(self, functions: Functions) -> Grammar:
        return self._grammar([*self._calls(functions), self._final(Text(never=HARMONY_TOKENS))])

    def or_value(self, functions: Functions, schema: str, *, several: bool) -> Grammar:
        return self._grammar([*self._calls(functions), self._final(Json(schema))])

    def _grammar(self, forms: Iterable[Form]) -> Grammar:
        reasoning, spoken = (self._message(f"<|channel|>{channel}") for channel in ("analysis", "commentary"))
        return Grammar("", bounded(Calls(tuple(forms), opening=(OneOf((reasoning, ())), OneOf((spoken, ()))))))

    def _calls(self, functions: Functions) -> list[Form]:
        require_small(functions)
        return [*map(self._call, functions)]

    def _call(self, function: Function) -> Form:
        recipient = f" to=functions.{function['name']}"
        # The models write the recipient behind the channel; the template writes it before.
        headers = (f"<|channel|>commentary{recipient} <|constrain|>json", f"{recipient}<|channel|>commentary json")
        arguments = Json(Parameters(function).json_schema())
        return (OneOf(tuple(map(self._marks.form, headers))), *self._marks.form(_MESSAGE), arguments)

    def _final(self, content: Json | Text) -> Form:
        return (*self._marks.form("<|channel|>final" + _MESSAGE), content)

    def _message(self, header: str) -> Form:
        """A message before the last one."""
        text = self._marks.text_up_to("<|end|>", tuple(mark for mark in HARMONY_TOKENS if mark != "<|end|>"))
        return (*self._marks.form(header + _MESSAGE), text, *self._marks.form(_NEXT))
