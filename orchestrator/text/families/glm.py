"""GLM and Laguna: arguments between `<arg_key>` and `<arg_value>`. LongCat: the same with markers of its own."""

from typing import Any

from orchestrator.text.answer.bound_calls import Fields, Style
from orchestrator.text.answer.call_syntax import CallSyntax
from orchestrator.text.answer.parsers import ThoughtMarkers
from orchestrator.text.answer.text_arguments import TextForm


def _lines(prefix: str) -> Style:
    """Each marker on a line of its own."""
    key, value, call = f"{prefix}arg_key>", f"{prefix}arg_value>", f"{prefix}tool_call>"
    return Style(
        Fields(f"<{key}", f"</{key}\n<{value}", f"</{value}", after="\n", never=(f"</{call}",)),
        start=f"<{call}",
        behind="\n",
        after=f"</{call}",
        separator="\n",
    )


def _syntax(name: str, prefix: str, style: Style, **more: Any) -> CallSyntax:
    key, value, call = (f"{prefix}{tag}>" for tag in ("arg_key", "arg_value", "tool_call"))
    inner = tuple(f"{mark}{tag}" for tag in (key, value) for mark in ("<", "</"))
    field = rf"\s*(?P<name>[^<]*[^<\s])\s*</{key}(?:\\n|\s)*<{value}"
    forms = TextForm(r"\s*(?P<name>[^\s<>{}]+)", f"<{key}", field, f"</{value}", apart=r"\n?").forms
    values = ((f"<{value}", f"</{value}"),)
    return CallSyntax(
        name, f"<{call}", f"</{call}", inner_markers=inner, values=values, forms=forms, style=style, **more
    )


GLM = _syntax(
    "glm47",
    "",
    Style(
        Fields("<arg_key>", "</arg_key><arg_value>", "</arg_value>", never=("</tool_call>",)),
        start="<tool_call>",
        after="</tool_call>",
    ),
    template_marks=(("<arg_key>",),),
    settings_names=("glm47", "laguna"),
    # Of GLM 4.5 and 4.6. In a template's source, the line break may be an escape.
    styles=tuple((f"</arg_key>{line}<arg_value>", _lines("")) for line in ("\n", "\\n")),
)
LONGCAT_THOUGHT = ThoughtMarkers("<longcat_think>", "</longcat_think>")
LONGCAT = _syntax("longcat", "longcat_", _lines("longcat_"))
