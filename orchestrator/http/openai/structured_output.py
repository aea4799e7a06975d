"""`response_format` and `tool_choice` as grammars that the answer is held to. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from orchestrator.http.errors import ApiError, unsupported
from orchestrator.text.answer.bound_calls import CallWriter, json_calls
from protocol.errors import InputError
from protocol.messages.base import MAX_SCHEMA
from protocol.messages.sampling import Calls, Grammar

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
                raise _wrong("response_format", "response_format.json_schema.schema must be a JSON schema.")
            return _grammar("response_format", schema)
    raise unsupported("response_format", "response_format has a type of text, json_object or json_schema.")


def forced_call(tools: Sequence[Json], choice: Any, most: int | None, write: CallWriter = json_calls) -> Grammar | None:
    """The grammar of the calls that `tool_choice` demands, or of optional calls to `strict` functions; None without
    either. `most`: calls that the client accepts, None for any number. `write`: in the model's syntax. Raises
    ApiError."""
    functions = [_function(tool) for tool in tools]
    name = _chosen_name(choice)
    if name is not None:
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise _wrong("tool_choice", f"tool_choice names {name!r}, and tools has no function of that name.")
        return Grammar("", _calls(write, functions))
    if choice == "required":
        if not functions:
            raise _wrong("tool_choice", "tool_choice demands a call, and tools is empty.")
        return Grammar("", _calls(write, functions, repeats=most != 1))
    if choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", "tool_choice can be none, auto, required, or the name of a function.")
    if choice != "none" and any(function.get("strict") for function in functions):
        return Grammar("", _calls(write, functions, optional=True))
    return None


def calls_or_form(tools: Sequence[Json], most: int | None, form: Grammar, write: CallWriter = json_calls) -> Grammar:
    """The grammar of an answer that is either calls, and nothing else, or has the form. Raises ApiError."""
    calls = _calls(write, [_function(tool) for tool in tools], repeats=most != 1)
    first, *_ = *calls.opening, *calls.start
    if isinstance(first, str) and first.startswith("{"):
        raise unsupported("response_format", "This model's calls are JSON too: leave out tools or response_format.")
    return Grammar(form.schema, calls)


def _chosen_name(choice: Any) -> str | None:
    if not isinstance(choice, Mapping):
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise unsupported("tool_choice", "tool_choice can be none, auto, required, or the name of a function.")
    return name


def _function(tool: Json) -> Json:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong("tools", "Each of tools must have a function with a name.")
    if not isinstance(function.get("parameters", _ANY_OBJECT) or _ANY_OBJECT, Mapping):
        raise _wrong("tools", f"The parameters of {function['name']!r} must be a JSON schema.")
    return function


def _calls(write: CallWriter, functions: Sequence[Json], *, repeats: bool = False, optional: bool = False) -> Calls:
    try:
        calls = write(functions)
    except InputError as error:
        raise _wrong("tools", str(error)) from error
    # Optional calls come behind any text, each of them. Only behind an opening do they follow one another.
    return replace(calls, repeats=bool(calls.opening) if optional else repeats, optional=optional)


def _grammar(param: str, schema: Json | bool) -> Grammar:
    try:
        text = json.dumps(schema)
    except RecursionError as error:
        raise _wrong(param, f"The schema in {param} is nested too deeply.") from error
    if len(text) > MAX_SCHEMA:
        raise _wrong(param, f"The schema in {param} has {len(text):,} characters; the limit is {MAX_SCHEMA:,}.")
    return Grammar(text)


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)
