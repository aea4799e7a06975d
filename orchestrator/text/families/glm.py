"""GLM and Laguna: arguments between `<arg_key>` and `<arg_value>`. LongCat: the same with markers of its own."""

from orchestrator.text.answer.bound_calls import Fields, Style
from orchestrator.text.answer.call_stream import CallForm
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


def _forms(prefix: str) -> tuple[CallForm, ...]:
    key, value = f"{prefix}arg_key>", f"{prefix}arg_value>"
    field = rf"\s*(?P<name>[^<]*[^<\s])\s*</{key}(?:\\n|\s)*<{value}"
    return TextForm(r"\s*(?P<name>[^\s<>{}]+)", f"<{key}", field, f"</{value}", apart=r"\n?").forms


GLM = CallSyntax(
    "glm47",
    "<tool_call>",
    "</tool_call>",
    inner_markers=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    template_marks=(("<arg_key>",),),
    settings_names=("glm47", "laguna"),
    values=(("<arg_value>", "</arg_value>"),),
    forms=_forms(""),
    style=Style(
        Fields("<arg_key>", "</arg_key><arg_value>", "</arg_value>", never=("</tool_call>",)),
        start="<tool_call>",
        after="</tool_call>",
    ),
    # Of GLM 4.5 and 4.6. In a template's source, the line break may be an escape.
    styles=tuple((f"</arg_key>{line}<arg_value>", _lines("")) for line in ("\n", "\\n")),
)
LONGCAT_THOUGHT = ThoughtMarkers("<longcat_think>", "</longcat_think>")
LONGCAT = CallSyntax(
    "longcat",
    "<longcat_tool_call>",
    "</longcat_tool_call>",
    inner_markers=("<longcat_arg_key>", "</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>"),
    values=(("<longcat_arg_value>", "</longcat_arg_value>"),),
    forms=_forms("longcat_"),
    style=_lines("longcat_"),
)
