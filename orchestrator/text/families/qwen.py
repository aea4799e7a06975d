"""Qwen: `<think>`, as DeepSeek and most others write it, and JSON calls, as Hermes models do; Qwen Coder's calls."""

from functools import partial

from orchestrator.text.answer.bound_calls import Fields, Marks, Style, StyledCalls
from orchestrator.text.answer.call_stream import WHOLE_JSON
from orchestrator.text.answer.call_syntax import CallSyntax
from orchestrator.text.answer.parsers import ThoughtMarkers
from orchestrator.text.answer.text_arguments import TextForm
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


_JSON = Style(None, start="<tool_call>\n", after="\n</tool_call>", separator="\n")
JSON_CALLS = StyledCalls(_JSON, Marks({}))
"""Of a model in which these markers are no tokens."""

THOUGHT = ThoughtMarkers("<think>", "</think>")
JSON_SYNTAX = CallSyntax(
    "json",
    "<tool_call>",
    "</tool_call>",
    template_marks=(),
    fallback_sign=partial(_asks_for, "<tool_call>"),
    settings_names=("json_tools",),
    forms=(WHOLE_JSON,),
    style=_JSON,
)
"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`"""
FENCED = CallSyntax(
    "fenced",
    "```json",
    "```",
    template_marks=(),
    fallback_sign=partial(_asks_for, "```json"),
    forms=(WHOLE_JSON,),
    style=Style(None, start="```json\n", after="\n```", separator="\n"),
)
"""The same in blocks of code."""
_NAMED = r"\s*(?P<name>[^\s<>]+)\s*>"
CODER = CallSyntax(
    "qwen3_coder",
    "<function=",
    "</function>",
    section=("<tool_call>", "</tool_call>"),
    # In a template's source, the line break may be an escape.
    template_marks=(("<tool_call>\\n<function=",), ("<tool_call>\n<function=",)),
    tagged=True,
    values=(("<parameter=", "</parameter>"),),
    forms=TextForm(_NAMED, "<parameter=", _NAMED, "</parameter>", gap="\n").forms,
    style=Style(
        Fields("<parameter=", ">\n", "</parameter>", gap="\n", after="\n", never=("</tool_call>",)),
        start="<tool_call>\n",
        before="<function=",
        behind=">\n",
        after="</function>\n</tool_call>",
        separator="\n",
    ),
)
