"""Kimi K2, and Kimi K3 with its markers of several tokens."""

import re

from orchestrator.text.answer.bound_calls import Style
from orchestrator.text.answer.call_stream import OBJECT, CallForm
from orchestrator.text.answer.call_syntax import CallSyntax
from orchestrator.text.answer.parsers import ThoughtMarkers
from orchestrator.text.answer.text_arguments import TextForm

K2 = CallSyntax(
    "kimi_k2",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    inner_markers=("<|tool_call_argument_begin|>",),
    forms=(
        CallForm(
            re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+):\d+)\s*<\|tool_call_argument_begin\|>" + OBJECT)
        ),
    ),
    style=Style(
        opening="<|tool_calls_section_begin|>",
        start="<|tool_call_begin|>",
        before="functions.",
        numbered=True,
        behind="<|tool_call_argument_begin|>",
        after="<|tool_call_end|>",
        closing="<|tool_calls_section_end|>",
    ),
)

_TOKENS = ("<|open|>", "<|close|>", "<|sep|>")

K3_THOUGHT = ThoughtMarkers(
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    _TOKENS,
    ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)
_K3_HEAD = r'[^<]*?\btool="(?P<name>[^"<]*)"[^<]*<\|sep\|>'
_K3_FIELD = r'(?=[^<]*?\bkey="(?P<name>[^"<]*)")[^<]*<\|sep\|>'
K3 = CallSyntax(
    "kimi_k3",
    "<|open|>call",
    "<|close|>call<|sep|>",
    section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    inner_markers=_TOKENS,
    template_marks=(_TOKENS,),
    values=(),
    forms=TextForm(_K3_HEAD, "<|open|>argument", _K3_FIELD, "<|close|>argument<|sep|>", apart=r"\n?").forms,
)
