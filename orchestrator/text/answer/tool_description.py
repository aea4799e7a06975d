"""Tools as a text for models whose chat templates show calls, but not the tools that can be called. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.text.answer.tool_syntax import Tools

_PLAIN = "NAME<｜tool▁sep｜>ARGUMENTS"
_BLOCK = "function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```"


def with_described_tools(
    messages: Sequence[Mapping[str, Any]], tools: Tools, *, block: bool
) -> Sequence[Mapping[str, Any]]:
    """`messages` with the tools behind the system messages that come first, in DeepSeek's syntax. `block`: arguments
    stand in a block of JSON."""
    begin = next((place for place, each in enumerate(messages) if each.get("role") != "system"), len(messages))
    described = {"role": "system", "content": _description(tools, block)}
    return [*messages[:begin], described, *messages[begin:]]


def _description(tools: Tools, block: bool) -> str:
    functions = "\n\n".join(_function(tool["function"]) for tool in tools)
    call = f"<｜tool▁call▁begin｜>{_BLOCK if block else _PLAIN}<｜tool▁call▁end｜>"
    return (
        f"## Tools\nThese tools can be called:\n\n{functions}\n\n"
        f"A call has exactly this form:\n<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>\n"
        "NAME is the name of a tool. ARGUMENTS is a JSON object that fits its parameters. Further calls follow the "
        "first one directly, before <｜tool▁calls▁end｜>."
    )


def _function(function: Mapping[str, Any]) -> str:
    parameters = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
    return f"### {function['name']}\nDescription: {function.get('description') or ''}\n\nParameters: {parameters}"
