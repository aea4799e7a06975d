"""`response_format` and `tool_choice` as grammars that the answer is held to. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.http.errors import unsupported, wrong
from orchestrator.text.answer_format import CallWriter
from orchestrator.text.families.qwen import JSON_CALLS
from protocol.errors import InputError
from protocol.messages.base import MAX_SCHEMA
from protocol.messages.grammar import Grammar

_ANY_OBJECT = {"type": "object"}
Json = Mapping[str, Any]


def response_grammar(form: Any) -> Grammar | None:
    """The grammar of a `response_format`; None for text. Raises ApiError."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return _grammar("response_format", _ANY_OBJECT)
        case "json_schema":
            content = form.get("json_schema")
            schema = content.get("schema", _ANY_OBJECT) if isinstance(content, Mapping) else None
            if not isinstance(schema, Mapping | bool):
                raise wrong("response_format", "response_format.json_schema.schema must be a JSON schema.")
            return _grammar("response_format", schema)
    raise unsupported("response_format", "response_format has a type of text, json_object or json_schema.")


def call_grammar(
    tools: Sequence[Json], choice: Any, most: int | None, form: Grammar | None = None, write: CallWriter = JSON_CALLS
) -> Grammar | None:
    """The grammar of the calls that `tool_choice` demands; else of calls or an answer of this form; else of optional
    calls to `strict` functions; None without any of these. `most`: calls that the client accepts, None for any number.
    `write`: in the model's syntax. Raises ApiError."""
    functions = [_function(tool) for tool in tools]
    chosen = _demanded(functions, choice)
    try:
        if chosen:
            return write.demanded(chosen, several=choice == "required" and most != 1)
        if choice == "none" or not functions:
            return None
        if form is not None:
            return write.or_value(functions, form.schema, several=most != 1)
        return write.optional(functions) if any(function.get("strict") for function in functions) else None
    except InputError as error:
        raise wrong("tools", str(error)) from error


def allowed(tools: Sequence[Json], choice: Any) -> tuple[tuple[Json, ...], Any]:
    """The tools that a choice of the type `allowed_tools` leaves, and the choice among them; otherwise these tools and
    this choice. Raises ApiError."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return tuple(tools), choice
    content = choice.get("allowed_tools")
    listed = content.get("tools") if isinstance(content, Mapping) else None
    if not isinstance(content, Mapping) or not isinstance(listed, list):
        raise wrong("tool_choice", "tool_choice of type allowed_tools has a mode and a list of tools.")
    names = [_chosen_name(one) for one in listed]
    known = {_function(tool)["name"]: tool for tool in tools}
    if unknown := [name for name in names if name not in known]:
        raise wrong("tool_choice", f"tool_choice allows {unknown[0]!r}, and tools has no function of that name.")
    return tuple(tool for name, tool in known.items() if name in names), content.get("mode")


def _demanded(functions: Sequence[Json], choice: Any) -> Sequence[Json]:
    """The functions of which one must be called; empty if none must be."""
    name = _chosen_name(choice)
    if name is not None:
        found = [function for function in functions if function["name"] == name]
        if not found:
            raise wrong("tool_choice", f"tool_choice names {name!r}, and tools has no function of that name.")
        return found
    if choice not in (None, "auto", "none", "required"):
        raise unsupported("tool_choice", "tool_choice can be none, auto, required, or names functions.")
    if choice == "required" and not functions:
        raise wrong("tool_choice", "tool_choice demands a call, and tools is empty.")
    return functions if choice == "required" else ()


def _chosen_name(choice: Any) -> str | None:
    if not isinstance(choice, Mapping):
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise unsupported("tool_choice", "tool_choice can be none, auto, required, or names functions.")
    return name


def _function(tool: Json) -> Json:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise wrong("tools", "Each of tools must have a function with a name.")
    if not isinstance(function.get("parameters", _ANY_OBJECT) or _ANY_OBJECT, Mapping):
        raise wrong("tools", f"The parameters of {function['name']!r} must be a JSON schema.")
    return function


def _grammar(param: str, schema: Json | bool) -> Grammar:
    try:
        text = json.dumps(schema)
    except RecursionError as error:
        raise wrong(param, f"The schema in {param} is nested too deeply.") from error
    if len(text) > MAX_SCHEMA:
        raise wrong(param, f"The schema in {param} has {len(text):,} characters; the limit is {MAX_SCHEMA:,}.")
    return Grammar(text)
