"""Tools for a template that knows none, or writes calls in an unknown syntax: the server describes them, and calls and
results are text of the turns. Pure.

Calls look as Hermes and Qwen write them, whose form other models were trained on too.
"""

import json
from dataclasses import replace

from orchestrator.text.answer.bound_calls import Style
from orchestrator.text.answer.call_syntax import Tools
from orchestrator.text.families.qwen import JSON_SYNTAX

NOTE = (
    "The chat template knows no tools that this server can read: they are described in the system message, and a call "
    "is JSON between <tool_call> and </tool_call>."
)


def _described(style: Style, tools: Tools) -> str:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"# Tools\nYou can call these functions:\n{functions}\n\n"
        f'To call one, write exactly this form:\n{style.start}{{"name": NAME, "arguments": OBJECT}}{style.after}\n'
        "NAME is the name of a function. OBJECT is a JSON object that fits its parameters. Further calls follow the "
        "first one. The next message has their results. If no function helps, answer without a call."
    )


GENERIC = replace(JSON_SYNTAX, fallback_sign=None, description=_described)
