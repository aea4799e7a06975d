"""Llama 3: a JSON object without markers, and nothing else in the answer."""

from orchestrator.text.answer.bound_calls import Style
from orchestrator.text.answer.call_stream import json_form
from orchestrator.text.answer.call_syntax import CallSyntax

_START = '{"name":'
LLAMA = CallSyntax(
    "llama3",
    _START,
    "",
    template_marks=(('"parameters": dictionary of argument name',),),
    forms=(json_form("", "parameters", r"\s*\}[\s;]*"),),
    style=Style(start=_START, before=" ", behind=', "parameters": ', quoted=True, after="}", separator="\n"),
)
