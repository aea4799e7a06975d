"""Parsers of tool-call syntaxes that mlx-lm's parsers do not have, or read too loosely. Pure."""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec


class Reading(NamedTuple):
    """What stands between two markers."""

    calls: list[Any]
    """Objects with `name` and `arguments`."""
    rest: str = ""
    """The text behind the calls, which belongs to none."""


class OwnSyntax(NamedTuple):
    """A syntax whose calls are read here."""

    start: str
    end: str
    """Empty: a call ends where the next one begins, or with the answer."""
    read: Callable[[str], Reading]
    """Gets the text between two markers; raises ValueError or LookupError."""
    wrappers: tuple[str, ...] = ()
    """Markers around all calls, which are dropped."""


def _json_call(content: str) -> Reading:
    return Reading([msgspec.json.decode(content.strip())])


def _llama_call(content: str) -> Reading:
    found, end = json.JSONDecoder().raw_decode(_LLAMA_START + content)
    if content[end - len(_LLAMA_START) :].strip(" \n;"):
        raise ValueError("text follows the call")
    return Reading([{"name": found["name"], "arguments": found["parameters"]}])


def _mistral_calls(content: str) -> Reading:
    """`NAME[ARGS]{…}`, repeated, with `[CALL_ID]ID` before `[ARGS]` in some models; older ones write a list."""
    decoder = json.JSONDecoder()
    if content.lstrip().startswith("["):
        begin = len(content) - len(content.lstrip())
        found, end = decoder.raw_decode(content, begin)
        return Reading([_with_decoded_arguments(call) for call in found], content[end:])
    calls, end = [], 0
    while header := _MISTRAL_HEADER.match(content, end):
        try:
            arguments, behind = decoder.raw_decode(content, header.end())
        except ValueError:
            break
        calls.append({"name": header["name"], "arguments": arguments, "id": header["id"]})
        end = behind
    return Reading(calls, content[end:])


def _deepseek_call(content: str) -> Reading:
    """`NAME<sep>{…}` as DeepSeek V3.1 writes it, or `function<sep>NAME` and a block of JSON, as V3 and R1 do."""
    head, separator, rest = content.partition(_DEEPSEEK_SEPARATOR)
    block = _DEEPSEEK_BLOCK.fullmatch(rest)
    name = (block["name"] if block else head).strip()
    if not separator or not name:
        raise ValueError("the call names no function")
    return Reading([_with_decoded_arguments({"name": name, "arguments": json.loads(block["json"] if block else rest)})])


def _with_decoded_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call.get("arguments", {})
    return {**call, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}


_LLAMA_START = '{"name":'
_MISTRAL_HEADER = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\](?P<id>[\w-]+)\s*)?\[ARGS\]\s*")
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_DEEPSEEK_BLOCK = re.compile(r"\s*(?P<name>[^\s`]+)\s*```(?:json)?\s(?P<json>.*)```\s*", re.DOTALL)

OWN_SYNTAXES = {
    "deepseek": OwnSyntax(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        _deepseek_call,
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "json": OwnSyntax("<tool_call>", "</tool_call>", _json_call),
    "llama3": OwnSyntax(_LLAMA_START, "", _llama_call),
    "mistral": OwnSyntax("[TOOL_CALLS]", "", _mistral_calls),
}
