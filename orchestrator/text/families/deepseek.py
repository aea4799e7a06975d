"""DeepSeek V3, R1 and V3.1. The templates show calls and results, and leave the tools to the system message."""

import json
import re
from collections.abc import Mapping
from typing import Any

from orchestrator.text.answer.bound_calls import Style
from orchestrator.text.answer.call_stream import OBJECT, CallForm
from orchestrator.text.answer.call_syntax import CallSyntax, Tools

_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_START, _END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def _described(style: Style, tools: Tools) -> str:
    functions = "\n\n".join(_function(tool["function"]) for tool in tools)
    call = f"{style.start}{style.before}NAME{style.behind}ARGUMENTS{style.after}"
    return (
        f"## Tools\nThese tools can be called:\n\n{functions}\n\n"
        f"A call has exactly this form:\n{style.opening}{call}{style.closing}\n"
        "NAME is the name of a tool. ARGUMENTS is a JSON object that fits its parameters. Further calls follow the "
        f"first one directly, before {style.closing}."
    )


def _function(function: Mapping[str, Any]) -> str:
    parameters = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
    return f"### {function['name']}\nDescription: {function.get('description') or ''}\n\nParameters: {parameters}"


_PLAIN = Style(opening=_SECTION[0], start=_START, behind=_SEPARATOR, after=_END, closing=_SECTION[1])
_IN_BLOCKS = _PLAIN._replace(before=f"function{_SEPARATOR}", behind="\n```json\n", after=f"\n```{_END}", separator="\n")

DEEPSEEK = CallSyntax(
    "deepseek",
    _START,
    _END,
    section=_SECTION,
    inner_markers=(_SEPARATOR,),
    template_marks=((_START, _SEPARATOR),),
    forms=(
        CallForm(re.compile(rf"\s*(?P<name>[^\s`]+?)\s*{_SEPARATOR}" + OBJECT)),
        CallForm(re.compile(rf"[^`]*?{_SEPARATOR}\s*(?P<name>[^\s`]+)\s*```(?:json)?" + OBJECT), r"\s*```"),
    ),
    style=_PLAIN,
    styles=(("```json", _IN_BLOCKS),),
    description=_described,
)
