"""Calls that can be held to the schemas of their functions while decoding: how a model writes them, as a grammar. Pure.

Only syntaxes whose arguments are JSON are here.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from orchestrator.text.answer.tool_syntax import ToolSyntax
from orchestrator.text.chat_template import ChatTemplate
from protocol.errors import InputError
from protocol.messages.base import MAX_SCHEMA
from protocol.messages.sampling import CallForm, Calls, Frame
from protocol.sampling.schema_bounds import MOST_LEVELS

Functions: TypeAlias = Sequence[Mapping[str, Any]]
"""The functions of a request's tools. Each has a name, and `parameters` that are a JSON schema, or none."""
CallWriter: TypeAlias = Callable[[Functions], Calls]
"""Makes the grammar of calls of given functions. Raises InputError."""

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class _Style(NamedTuple):
    """How one model writes calls."""

    opening: str = ""
    start: str = ""
    before: tuple[str, str] | None = None
    """What stands before and behind the name of the function, before its arguments. None: a call is a JSON object with
    the name and the arguments."""
    quoted: bool = False
    """The name is a JSON string."""
    after: str = ""
    separator: str = ""
    closing: str = ""


_JSON = _Style(start="<tool_call>\n", after="\n</tool_call>", separator="\n")
"""As in the chat templates of Qwen and Hermes models."""
_LLAMA = _Style(start='{"name":', before=(" ", ', "parameters": '), quoted=True, after="}", separator="\n")
_MISTRAL = _Style(start="[TOOL_CALLS]", before=("", "[ARGS]"))
_MISTRAL_LIST = _Style(opening="[TOOL_CALLS] [", separator=", ", closing="]")
_DEEPSEEK = _Style(
    opening="<｜tool▁calls▁begin｜>",
    start="<｜tool▁call▁begin｜>",
    before=("", "<｜tool▁sep｜>"),
    after="<｜tool▁call▁end｜>",
    closing="<｜tool▁calls▁end｜>",
)
_DEEPSEEK_BLOCK = _DEEPSEEK._replace(
    before=("function<｜tool▁sep｜>", "\n```json\n"), after="\n```<｜tool▁call▁end｜>", separator="\n"
)


def call_writer(syntax: ToolSyntax, template: ChatTemplate) -> CallWriter | None:
    """None for a syntax whose calls can't be bound."""
    style = _style(syntax, template)
    ids = {mark: template.codec.id_of(mark) for mark in syntax.tokens}
    tokens = {mark: token for mark, token in ids.items() if token is not None}
    return None if style is None else lambda functions: _calls(style, functions, tokens)


def json_calls(functions: Functions) -> Calls:
    """`<tool_call>` and JSON, of a model in which these markers are no tokens. Raises InputError."""
    return _calls(_JSON, functions, {})


def _style(syntax: ToolSyntax, template: ChatTemplate) -> _Style | None:
    match syntax.name:
        case "json":
            return _JSON
        case "llama3":
            return _LLAMA
        case "mistral":
            return _MISTRAL if template.mentions("[ARGS]") else _MISTRAL_LIST
        case "deepseek":
            return _DEEPSEEK_BLOCK if template.mentions("```json") else _DEEPSEEK
    return None


def _calls(style: _Style, functions: Functions, tokens: Mapping[str, int]) -> Calls:
    lenient = not any(function.get("strict") for function in functions)
    after = _frame(style.after, tokens)
    if style.before is None:
        whole = {"anyOf": [_whole_call(place, function) for place, function in enumerate(functions)]}
        forms = (CallForm(_schema(whole, lenient), after=after),)
    else:
        ahead, behind = (_frame(text, tokens) for text in style.before)
        forms = tuple(
            CallForm(
                _schema(function.get("parameters") or _ANY_OBJECT, lenient),
                (*ahead, json.dumps(function["name"]) if style.quoted else function["name"], *behind),
                after,
            )
            for function in functions
        )
    size = sum(len(form.schema) for form in forms)
    if size > MAX_SCHEMA:
        raise InputError(f"The schema in tools has {size:,} characters; the limit is {MAX_SCHEMA:,}.")
    return Calls(
        forms,
        _frame(style.opening, tokens),
        _frame(style.start, tokens),
        _frame(style.separator, tokens),
        _frame(style.closing, tokens),
        letters=next((mark for mark in tokens if (style.opening or style.start).startswith(mark)), ""),
    )


def _frame(text: str, tokens: Mapping[str, int]) -> Frame:
    """`text` with the ids of the `tokens` in it."""
    pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
    return tuple(tokens.get(piece, piece) for piece in pieces if piece)


def _schema(schema: Mapping[str, Any], lenient: bool) -> str:
    # OpenAI enforces only strict schemas; a lenient grammar accepts many schemas that a strict one refuses.
    try:
        return json.dumps({**schema, "x-guidance": {"lenient": True}} if lenient else schema)
    except RecursionError as error:
        raise InputError("The schema in tools is nested too deeply.") from error


def _whole_call(place: int, function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters") or _ANY_OBJECT
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
