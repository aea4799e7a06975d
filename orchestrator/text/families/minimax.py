"""MiniMax M2, MiniCPM 5 and Muse Spark: an element of XML for each call and each argument."""

from orchestrator.text.answer.bound_calls import Fields, Style
from orchestrator.text.answer.call_stream import CallForm
from orchestrator.text.answer.call_syntax import CallSyntax
from orchestrator.text.answer.text_arguments import TextForm


def _forms(head: str, tag: str, *, cdata: bool = False) -> tuple[CallForm, ...]:
    """`head`: of a call, up to the name of its function."""
    named = r"""["']?(?P<name>[^"'<>]+)["']?[^<>]*>"""
    field, apart = rf"\b[^<>]*?\bname\s*=\s*{named}", r"\n?" if cdata else r"\n[ \t]*"
    return TextForm(rf"{head}\s*{named}", f"<{tag}", field, f"</{tag}>", apart=apart, cdata=cdata).forms


MINIMAX = CallSyntax(
    "minimax_m2",
    "<invoke name=",
    "</invoke>",
    section=("<minimax:tool_call>", "</minimax:tool_call>"),
    tagged=True,
    values=(("<parameter name=", "</parameter>"),),
    forms=_forms("", "parameter"),
    style=Style(
        Fields('<parameter name="', '">', "</parameter>", after="\n", never=("</invoke>", "</minimax:tool_call>")),
        opening="<minimax:tool_call>\n",
        start='<invoke name="',
        behind='">\n',
        # As a separator, the line break would be taken for the beginning of `closing`.
        after="</invoke>\n",
        closing="</minimax:tool_call>",
    ),
)
MINICPM = CallSyntax(
    "minicpm5",
    "<function name=",
    "</function>",
    template_marks=(('<function name="', '<param name="'),),
    forms=_forms("", "param", cdata=True),
    values=(("<param name=", "</param>"),),
    style=Style(
        Fields('<param name="', '">', "</param>", never=("</function>",)),
        start='<function name="',
        behind='">',
        after="</function>",
    ),
)

MUSE_SPARK = CallSyntax(
    "muse_spark",
    "<atem:invoke",
    "</atem:invoke>",
    section=("<atem:function_calls>", "</atem:function_calls>"),
    tagged=True,
    values=(("<atem:parameter", "</atem:parameter>"),),
    forms=_forms(r"[^<>]*?\bname\s*=", "atem:parameter"),
)
"""Its texts can't be told from numbers, so its calls can't be bound."""
