"""`response_format` and `tool_choice` as grammars that the answer is held to. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from orchestrator.http.errors import ApiError, unsupported
from protocol.messages.base import MAX_SCHEMA
from protocol.messages.sampling import Grammar
from protocol.sampling.schema_bounds import MOST_LEVELS

_BEFORE, _AFTER = "<tool_call>\n", "\n</tool_call>"
"""As in the chat templates of Qwen and Hermes models."""
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


def forced_call(tools: Sequence[Json], choice: Any, most: int | None) -> Grammar | None:
    """The grammar of the calls that `tool_choice` demands, or of optional calls to `strict` functions; None without
    either. `most`: calls that the client accepts, None for any number. Raises ApiError."""
    functions = [_function(tool) for tool in tools]
    name = _chosen_name(choice)
    if name is not None:
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise _wrong("tool_choice", f"tool_choice names {name!r}, and tools has no function of that name.")
        return _calls(functions, repeats=False)
    if choice == "required":
        if not functions:
            raise _wrong("tool_choice", "tool_choice demands a call, and tools is empty.")
        return _calls(functions, repeats=most != 1)
    if choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", "tool_choice can be none, auto, required, or the name of a function.")
    if choice != "none" and any(function.get("strict") for function in functions):
        return _calls(functions, optional=True)
    return None


def calls_or_form(tools: Sequence[Json], most: int | None, form: Grammar) -> Grammar:
    """The grammar of an answer that is either calls, and nothing else, or has the form. Raises ApiError."""
    calls = _calls([_function(tool) for tool in tools], repeats=most != 1)
    return replace(calls, otherwise=form.schema)


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


def _calls(functions: Sequence[Json], *, repeats: bool = False, optional: bool = False) -> Grammar:
    schema: dict[str, Any] = {"anyOf": [_call(place, function) for place, function in enumerate(functions)]}
    if not any(function.get("strict") for function in functions):
        # OpenAI enforces only strict schemas; a lenient grammar accepts many schemas that a strict one refuses.
        schema["x-guidance"] = {"lenient": True}
    return _grammar("tools", schema, _BEFORE, _AFTER, repeats, optional)


def _call(place: int, function: Json) -> Json:
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
        raise _wrong("tools", f"The schema in tools is nested deeper than {MOST_LEVELS} levels.")
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


def _grammar(param: str, schema: Json | bool, *frame: Any) -> Grammar:
    try:
        text = json.dumps(schema)
    except RecursionError as error:
        raise _wrong(param, f"The schema in {param} is nested too deeply.") from error
    if len(text) > MAX_SCHEMA:
        raise _wrong(param, f"The schema in {param} has {len(text):,} characters; the limit is {MAX_SCHEMA:,}.")
    return Grammar(text, *frame)


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)
