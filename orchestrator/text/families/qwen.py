"""Qwen: `<think>`, as DeepSeek and most others write it, and JSON calls, as Hermes models do; Qwen Coder's calls."""

import json
import re
from functools import partial
from typing import Any

from orchestrator.text.answer.bound_calls import Fields, Marks, Style, StyledCalls
from orchestrator.text.answer.call_stream import CallForm, FieldMarks, json_header
from orchestrator.text.answer.call_syntax import CallSyntax
from orchestrator.text.answer.parsers import ThoughtMarkers
from orchestrator.text.chat_template import ChatTemplate
from protocol.errors import InputError

_PROBE = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}


def _asks_for(mark: str, template: ChatTemplate) -> bool:
    """By a prompt with a tool: the source of many templates has these words for other syntaxes."""
    try:
        text = template.text([{"role": "user", "content": ""}], [_PROBE])
    except InputError:
        return False
    return mark in text and '"arguments"' in text


def _json_call(content: str) -> tuple[list[Any], str]:
    # Models forget the last brace, or write one more.
    content = content.lstrip()
    found, end = json.JSONDecoder(strict=False).raw_decode(content + "}")
    return [found], content[end:].lstrip("} \n")


_JSON = Style(None, start="<tool_call>\n", after="\n</tool_call>", separator="\n")
JSON_CALLS = StyledCalls(_JSON, Marks({}))
"""Of a model in which these markers are no tokens."""

THOUGHT = ThoughtMarkers("<think>", "</think>")
_FORMS = (CallForm(json_header(r'\s*\{\s*"name"\s*:'), r"\s*\}"),)
JSON_SYNTAX = CallSyntax(
    "json",
    "<tool_call>",
    "</tool_call>",
    template_marks=(),
    fallback_sign=partial(_asks_for, "<tool_call>"),
    settings_names=("json_tools",),
    reader=_json_call,
    forms=_FORMS,
    style=_JSON,
)
"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`"""
FENCED = CallSyntax(
    "fenced",
    "```json",
    "```",
    template_marks=(),
    fallback_sign=partial(_asks_for, "```json"),
    reader=_json_call,
    forms=_FORMS,
    style=Style(None, start="```json\n", after="\n```", separator="\n"),
)
"""The same in blocks of code."""
_FIELD = FieldMarks(
    re.compile(r"\s*<parameter=\s*(?P<key>[^\s<>]+)\s*>(?:\n|(?=[^\n]))"), "<parameter=", "</parameter>", space="\n"
)
CODER = CallSyntax(
    "qwen3_coder",
    "<function=",
    "</function>",
    section=("<tool_call>", "</tool_call>"),
    # In a template's source, the line break may be an escape.
    template_marks=(("<tool_call>\\n<function=",), ("<tool_call>\n<function=",)),
    text_arguments=True,
    tagged=True,
    values=(("<parameter=", "</parameter>"),),
    forms=(CallForm(re.compile(r"\s*(?P<name>[^\s<>]+)\s*>(?=\s*<p)"), fields=(_FIELD,)),),
    style=Style(
        Fields("<parameter=", ">\n", "</parameter>", gap="\n", after="\n", never=("</tool_call>",)),
        start="<tool_call>\n",
        before="<function=",
        behind=">\n",
        after="</function>\n</tool_call>",
        separator="\n",
    ),
)
