"""Kimi K2, and Kimi K3 with its markers of several tokens."""

import re

from orchestrator.text.answer.bound_calls import Style
from orchestrator.text.answer.call_stream import OBJECT, CallForm, FieldMarks
from orchestrator.text.answer.call_syntax import CallSyntax
from orchestrator.text.answer.parsers import ThoughtMarkers

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
_K3_MARK = re.compile(r"<\|(o|c|s)(?:pen|lose|ep)\|>")
_K3_ORDER = re.compile(r"s(?:oscs)*")
"""Markers in a call: its own header ends, then arguments open and close."""

K3_THOUGHT = ThoughtMarkers(
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    _TOKENS,
    ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)
_K3_HEAD = r'{}[^<]*?\b{}="(?P<{}>[^"<]*)"[^<]*<\|sep\|>'
_K3_FIELD = FieldMarks(
    re.compile(_K3_HEAD.format(r"\s*<\|open\|>argument", "key", "key") + "(?=.)", re.DOTALL),
    "<|open|>argument",
    "<|close|>argument<|sep|>",
    space="",
)
K3 = CallSyntax(
    "kimi_k3",
    "<|open|>call",
    "<|close|>call<|sep|>",
    section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    inner_markers=_TOKENS,
    template_marks=(_TOKENS,),
    values=(),
    forms=(
        CallForm(re.compile(_K3_HEAD.format("", "tool", "name") + r"(?=\s*<\|open\|>argument)"), fields=(_K3_FIELD,)),
    ),
    well_formed=lambda content: _K3_ORDER.fullmatch("".join(_K3_MARK.findall(content))) is not None,
)
