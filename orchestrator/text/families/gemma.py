"""Gemma 4 and Function Gemma: `call:NAME{…}`, an object whose names have no quotes."""

import re
from functools import partial

from orchestrator.text.answer.bound_calls import BareObject, Style
from orchestrator.text.answer.call_stream import CallForm, QuotedTexts
from orchestrator.text.answer.call_syntax import CallSyntax
from orchestrator.text.answer.parsers import ThoughtMarkers

_QUOTE = '<|"|>'
THOUGHT = ThoughtMarkers("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>"))
GEMMA = CallSyntax(
    "gemma4",
    "<|tool_call>",
    "<tool_call|>",
    inner_markers=(_QUOTE,),
    template_marks=(("<|tool_call>", "<tool_call|>"),),
    values=((_QUOTE, _QUOTE),),
    forms=(CallForm(re.compile(r"[\s,;]*call:(?P<name>[\w.-]+)(?=\{)")),),
    translator=partial(QuotedTexts, _QUOTE),
    style=Style(
        BareObject(_QUOTE, never=("<tool_call|>",)), start="<|tool_call>", before="call:", after="<tool_call|>"
    ),
)
FUNCTION_GEMMA = CallSyntax(
    "function_gemma",
    "<start_function_call>",
    "<end_function_call>",
    inner_markers=("<escape>",),
    forms=(CallForm(re.compile(r"\s*call:(?P<name>\w+)(?=\{)")),),
    translator=partial(QuotedTexts, "<escape>"),
    values=(("<escape>", "<escape>"),),
    style=Style(
        BareObject("<escape>", never=("}", "<end_function_call>"), flat=True),
        start="<start_function_call>",
        before="call:",
        after="<end_function_call>",
    ),
)
