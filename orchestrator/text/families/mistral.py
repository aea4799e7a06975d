"""Mistral and Magistral: `[TOOL_CALLS]NAME[ARGS]{…}`; older models write a list of JSON objects."""

import json
import re
from typing import Any

from orchestrator.text.answer.bound_calls import Style
from orchestrator.text.answer.call_stream import OBJECT, CallForm, json_header
from orchestrator.text.answer.call_syntax import CallSyntax
from orchestrator.text.answer.parsers import ThoughtMarkers

_DECODER = json.JSONDecoder()
_HEADER = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\](?P<id>[\w-]+)\s*)?(?:\[ARGS\]\s*|(?=\{))")
_LIST_START = re.compile(r"\s*(?=\[)")
_LIST_SEPARATOR = re.compile(r"\s*[\[,]\s*")
_LIST_END = re.compile(r"\s*\]")


def _calls(content: str) -> tuple[list[Any], str]:
    """`NAME[ARGS]{…}`, repeated, with `[CALL_ID]ID` before `[ARGS]` in some models; older ones write a list."""
    if listed := _LIST_START.match(content):
        return _listed_calls(content, listed.end())
    calls, end = [], 0
    while header := _HEADER.match(content, end):
        try:
            arguments, behind = _DECODER.raw_decode(content, header.end())
        except ValueError:
            break
        calls.append({"name": header["name"], "arguments": arguments, "id": header["id"]})
        end = behind
    return calls, content[end:]


def _listed_calls(content: str, end: int) -> tuple[list[Any], str]:
    """`{…}, {…}]` from `end` on. The list may be cut off behind a call."""
    calls = []
    while separator := _LIST_SEPARATOR.match(content, end):
        try:
            call, behind = _DECODER.raw_decode(content, separator.end())
        except ValueError:
            break
        arguments = call.get("arguments", {})
        calls.append({**call, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments})
        end = behind
    closed = _LIST_END.match(content, end)
    return calls, content[closed.end() if closed else end :]


THOUGHT = ThoughtMarkers("[THINK]", "[/THINK]")
MISTRAL = CallSyntax(
    "mistral",
    "[TOOL_CALLS]",
    "",
    inner_markers=("[ARGS]", "[CALL_ID]"),
    reader=_calls,
    forms=(
        CallForm(re.compile(_HEADER.pattern + OBJECT)),
        CallForm(json_header(r'\s*[\[,]\s*\{\s*"name"\s*:'), r'\s*(?:,\s*"id"\s*:\s*"[^"]*"\s*)?\}(?:\s*\])?'),
    ),
    style=Style(None, opening="[TOOL_CALLS] [", separator=", ", closing="]"),
    styles=(("[ARGS]", Style(start="[TOOL_CALLS]", behind="[ARGS]")),),
)
