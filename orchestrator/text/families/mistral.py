"""Mistral and Magistral: `[TOOL_CALLS]NAME[ARGS]{…}`; older models write a list of JSON objects."""

import re

from orchestrator.text.answer.bound_calls import Style
from orchestrator.text.answer.call_stream import OBJECT, CallForm, json_form
from orchestrator.text.answer.call_syntax import CallSyntax
from orchestrator.text.answer.parsers import ThoughtMarkers

_HEADER = r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\](?P<id>[\w-]+)\s*)?(?:\[ARGS\])?"
_TAIL = r'\s*(?:,\s*"id"\s*:\s*"[^"]*"\s*)?\}(?:\s*\])?'
THOUGHT = ThoughtMarkers("[THINK]", "[/THINK]")
MISTRAL = CallSyntax(
    "mistral",
    "[TOOL_CALLS]",
    "",
    inner_markers=("[ARGS]", "[CALL_ID]"),
    forms=(
        CallForm(re.compile(_HEADER + OBJECT)),
        json_form(r'\s*[\[,]\s*\{\s*"name"\s*:', tail=_TAIL),
    ),
    style=Style(None, opening="[TOOL_CALLS] [", separator=", ", closing="]"),
    styles=(("[ARGS]", Style(start="[TOOL_CALLS]", behind="[ARGS]")),),
)
