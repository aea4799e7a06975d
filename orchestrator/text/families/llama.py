"""Llama 3: a JSON object without markers, and nothing else in the answer."""

import json
from typing import Any

from orchestrator.text.answer.bound_calls import Style
from orchestrator.text.answer.call_stream import CallForm, json_header
from orchestrator.text.answer.call_syntax import CallSyntax

_START = '{"name":'


def _call(content: str) -> tuple[list[Any], str]:
    found, end = json.JSONDecoder().raw_decode(_START + content + "}")
    if content[end - len(_START) :].strip("} \n;"):
        raise ValueError("text follows the call")
    return [{"name": found["name"], "arguments": found["parameters"]}], ""


LLAMA = CallSyntax(
    "llama3",
    _START,
    "",
    template_marks=(('"parameters": dictionary of argument name',),),
    reader=_call,
    forms=(CallForm(json_header("", "parameters"), r"\s*\}[\s;]*"),),
    style=Style(start=_START, before=" ", behind=', "parameters": ', quoted=True, after="}", separator="\n"),
)
