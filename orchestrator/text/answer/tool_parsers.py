"""What reads the calls of a family: mlx-lm's parsers, and our own where it has none. Pure."""

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

_PACKAGE = "orchestrator_mlx_tool_parsers"
"""The name under which their package is loaded."""


def has_mlx_parser(name: str) -> bool:
    """Whether the installed mlx-lm has this parser."""
    return (_folder() / f"{name}.py").is_file()


def mlx_parser(name: str) -> ModuleType:
    """The module of a parser: `parse_tool_call`, `tool_call_start`, `tool_call_end`."""
    if _PACKAGE not in sys.modules:
        folder = _folder()
        spec = importlib.util.spec_from_file_location(
            _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{_PACKAGE}.{name}")


def _folder() -> Path:
    found = importlib.util.find_spec("mlx_lm")
    assert found is not None
    return Path(next(iter(found.submodule_search_locations or ()))) / "tool_parsers"


class ReadCalls(NamedTuple):
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
    read: Callable[[str], ReadCalls]
    """Gets the text between two markers; raises ValueError or LookupError."""
    section: tuple[str, str] | None = None
    """Markers around all calls."""


def _json_call(content: str) -> ReadCalls:
    return ReadCalls([msgspec.json.decode(content.strip())])


def _llama_call(content: str) -> ReadCalls:
    found, end = _DECODER.raw_decode(_LLAMA_START + content)
    if content[end - len(_LLAMA_START) :].strip(" \n;"):
        raise ValueError("text follows the call")
    return ReadCalls([{"name": found["name"], "arguments": found["parameters"]}])


def _mistral_calls(content: str) -> ReadCalls:
    """`NAME[ARGS]{…}`, repeated, with `[CALL_ID]ID` before `[ARGS]` in some models; older ones write a list."""
    if listed := _LIST_START.match(content):
        return _listed_calls(content, listed.end())
    calls, end = [], 0
    while header := _MISTRAL_HEADER.match(content, end):
        try:
            arguments, behind = _DECODER.raw_decode(content, header.end())
        except ValueError:
            break
        calls.append({"name": header["name"], "arguments": arguments, "id": header["id"]})
        end = behind
    return ReadCalls(calls, content[end:])


def _listed_calls(content: str, end: int) -> ReadCalls:
    """`{…}, {…}]` from `end` on. The list may be cut off behind a call."""
    calls = []
    while separator := _LIST_SEPARATOR.match(content, end):
        try:
            call, behind = _DECODER.raw_decode(content, separator.end())
        except ValueError:
            break
        calls.append(_with_decoded_arguments(call))
        end = behind
    closed = _LIST_END.match(content, end)
    return ReadCalls(calls, content[closed.end() if closed else end :])


def _gemma_calls(content: str) -> ReadCalls:
    """`call:NAME{…}`, repeated: JSON whose names have no quotes, and whose texts stand between `<|"|>`."""
    outside = True
    pieces = []
    for piece in content.split(_GEMMA_QUOTE):
        pieces.append(_GEMMA_NAME.sub(r'\1"\2"\3', piece) if outside else json.dumps(piece))
        outside = not outside
    if outside:
        raise ValueError("a text has no end")
    written, calls, end = "".join(pieces), [], 0
    while header := _GEMMA_HEADER.match(written, end):
        arguments, end = _DECODER.raw_decode(written, header.end())
        calls.append({"name": header["name"], "arguments": arguments})
    if written[end:].strip():
        raise ValueError("text follows the calls")
    return ReadCalls(calls)


def _deepseek_call(content: str) -> ReadCalls:
    """`NAME<sep>{…}` as DeepSeek V3.1 writes it, or `function<sep>NAME` and a block of JSON, as V3 and R1 do."""
    head, separator, rest = content.partition(_DEEPSEEK_SEPARATOR)
    block = _DEEPSEEK_BLOCK.fullmatch(rest)
    name = (block["name"] if block else head).strip()
    if not separator or not name:
        raise ValueError("the call names no function")
    return ReadCalls(
        [_with_decoded_arguments({"name": name, "arguments": json.loads(block["json"] if block else rest)})]
    )


def _with_decoded_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call.get("arguments", {})
    return {**call, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}


_DECODER = json.JSONDecoder()
_LLAMA_START = '{"name":'
_MISTRAL_HEADER = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\](?P<id>[\w-]+)\s*)?\[ARGS\]\s*")
_LIST_START = re.compile(r"\s*(?=\[)")
_LIST_SEPARATOR = re.compile(r"\s*[\[,]\s*")
_LIST_END = re.compile(r"\s*\]")
_GEMMA_QUOTE = '<|"|>'
_GEMMA_NAME = re.compile(r"([{,]\s*)(?!call:[\w.-]+\{)([\w.-]+)(\s*:)")
_GEMMA_HEADER = re.compile(r"[\s,;]*call:(?P<name>[\w.-]+)(?=\{)")
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_DEEPSEEK_BLOCK = re.compile(r"\s*(?P<name>[^\s`]+)\s*```(?:json)?\s(?P<json>.*)```\s*", re.DOTALL)

OWN_SYNTAXES = {
    "deepseek": OwnSyntax(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        _deepseek_call,
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "gemma4": OwnSyntax("<|tool_call>", "<tool_call|>", _gemma_calls),
    "json": OwnSyntax("<tool_call>", "</tool_call>", _json_call),
    "llama3": OwnSyntax(_LLAMA_START, "", _llama_call),
    "mistral": OwnSyntax("[TOOL_CALLS]", "", _mistral_calls),
}
