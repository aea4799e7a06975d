"""Qwen: `<think>`, as DeepSeek and most others write it, and JSON calls, as Hermes models do; Qwen Coder's calls."""

from typing import Any

import msgspec

from orchestrator.text.answer.bound_calls import Fields, Marks, Style, StyledCalls
from orchestrator.text.answer.call_syntax import CallSyntax, as_it_is
from orchestrator.text.answer.parsers import ThoughtMarkers
from orchestrator.text.answer.text_arguments import TextForm
from orchestrator.text.chat_template import ChatTemplate
from protocol.errors import InputError

_PROBE = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}


def _asks_for_json(template: ChatTemplate) -> bool:
    """By a prompt with a tool: the source of many templates has these words for other syntaxes."""
    try:
        text = template.text([{"role": "user", "content": ""}], [_PROBE])
    except InputError:
        return False
    return "<tool_call>" in text and '"arguments"' in text


def _json_call(content: str) -> tuple[list[Any], str]:
    return [msgspec.json.decode(content.strip())], ""


_JSON = Style(None, start="<tool_call>\n", after="\n</tool_call>", separator="\n")
JSON_CALLS = StyledCalls(_JSON, Marks({}))
"""Of a model in which these markers are no tokens."""

THOUGHT = ThoughtMarkers("<think>", "</think>")
JSON_SYNTAX = CallSyntax(
    "json",
    "<tool_call>",
    "</tool_call>",
    template_marks=(),
    fallback_sign=_asks_for_json,
    settings_names=("json_tools",),
    reader=_json_call,
    without_end=as_it_is,
    style=_JSON,
)
"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`"""
_NAMED = r"\s*(?P<name>[^\s<>]+)\s*>"
CODER = CallSyntax(
    "qwen3_coder",
    "<tool_call>",
    "</tool_call>",
    # In a template's source, the line break may be an escape.
    template_marks=(("<tool_call>\\n<function=",), ("<tool_call>\n<function=",)),
    texts=TextForm(rf"\s*<function={_NAMED}", f"<parameter={_NAMED}", "</parameter>", "</function>", gap="\n"),
    style=Style(
        Fields("<parameter=", ">\n", "</parameter>", gap="\n", after="\n", never=("</tool_call>",)),
        start="<tool_call>\n",
        before="<function=",
        behind=">\n",
        after="</function>\n</tool_call>",
        separator="\n",
    ),
)
