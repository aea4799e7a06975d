"""Kimi K2, and Kimi K3 with its markers of several tokens."""

import re

from orchestrator.text.answer.bound_calls import Style
from orchestrator.text.answer.call_syntax import CallSyntax
from orchestrator.text.answer.parsers import ThoughtMarkers

K2 = CallSyntax(
    "kimi_k2",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    inner_markers=("<|tool_call_argument_begin|>",),
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
K3 = CallSyntax(
    "kimi_k3",
    "<|open|>call",
    "<|close|>call<|sep|>",
    section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    inner_markers=_TOKENS,
    template_marks=(_TOKENS,),
    values=(),
    well_formed=lambda content: _K3_ORDER.fullmatch("".join(_K3_MARK.findall(content))) is not None,
)
