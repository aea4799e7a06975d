"""Gemma 4 and Function Gemma: `call:NAME{…}`, an object whose names have no quotes."""

import json
import re
from functools import partial
from typing import Any

from orchestrator.text.answer.bound_calls import BareObject, Style
from orchestrator.text.answer.call_stream import OBJECT, CallForm, QuotedTexts
from orchestrator.text.answer.call_syntax import CallSyntax, in_order
from orchestrator.text.answer.parsers import ThoughtMarkers

_QUOTE = '<|"|>'
_NAME = re.compile(r"([{,]\s*)(?!call:[\w.-]+\{)([\w.-]+)(\s*:)")
_TRANSLATOR = partial(QuotedTexts, _QUOTE, partial(_NAME.sub, r'\1"\2"\3'))
_HEADER = re.compile(r"[\s,;]*call:(?P<name>[\w.-]+)(?=\{)")


def _calls(content: str) -> tuple[list[Any], str]:
    """`call:NAME{…}`, repeated: JSON whose names have no quotes, and whose texts stand between `<|"|>`."""
    texts = _TRANSLATOR()
    written, calls, end = texts.push(content) + texts.finish(), [], 0
    if texts.inside:
        raise ValueError("a text has no end")
    while header := _HEADER.match(written, end):
        arguments, end = json.JSONDecoder().raw_decode(written, header.end())
        calls.append({"name": header["name"], "arguments": arguments})
    if written[end:].strip():
        raise ValueError("text follows the calls")
    return calls, ""


THOUGHT = ThoughtMarkers("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>"))
GEMMA = CallSyntax(
    "gemma4",
    "<|tool_call>",
    "<tool_call|>",
    inner_markers=(_QUOTE,),
    template_marks=(("<|tool_call>", "<tool_call|>"),),
    reader=_calls,
    values=((_QUOTE, _QUOTE),),
    forms=(CallForm(re.compile(r"[\s,;]*call:(?P<name>[\w.-]+)" + OBJECT)),),
    translator=_TRANSLATOR,
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
    well_formed=in_order("call:", "}"),
    values=(("<escape>", "<escape>"),),
    style=Style(
        BareObject("<escape>", never=("}", "<end_function_call>"), flat=True),
        start="<start_function_call>",
        before="call:",
        after="<end_function_call>",
    ),
)
