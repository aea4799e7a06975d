"""MiniMax M2, MiniCPM 5 and Muse Spark: an element of XML for each call and each argument."""

import re

from orchestrator.text.answer.bound_calls import Fields, Style
from orchestrator.text.answer.call_stream import CallForm, FieldMarks
from orchestrator.text.answer.call_syntax import CallSyntax, in_order

_HEADER = re.compile(r"""\s*["']?(?P<name>[^"'<>]+)["']?\s*>""")


def _fields(tag: str, cdata: str = "") -> FieldMarks:
    """Of elements, whose texts may be `cdata`."""
    value = re.escape(cdata) if cdata else r"(?=[^\s<]|<[^!]|<![^\[])"
    field = re.compile(rf"""\s*<{tag}\b[^>]*?\bname\s*=\s*["']?(?P<key>[^"'>]+)["']?[^>]*>\s*{value}""")
    return FieldMarks(field, f"<{tag}", f"{']]>' if cdata else ''}</{tag}>", space="" if cdata else None)


MINIMAX = CallSyntax(
    "minimax_m2",
    "<invoke name=",
    "</invoke>",
    section=("<minimax:tool_call>", "</minimax:tool_call>"),
    text_arguments=True,
    tagged=True,
    values=(("<parameter name=", "</parameter>"),),
    forms=(CallForm(_HEADER, fields=(_fields("parameter"),)),),
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
    forms=(CallForm(_HEADER, fields=(_fields("param"), _fields("param", "<![CDATA["))),),
    text_arguments=True,
    values=(("<param name=", "</param>"),),
    style=Style(
        Fields('<param name="', '">', "</param>", never=("</function>",)),
        start='<function name="',
        behind='">',
        after="</function>",
    ),
)

_ordered = in_order("<atem:parameter", "</atem:parameter>")
MUSE_SPARK = CallSyntax(
    "muse_spark",
    "<atem:invoke",
    "</atem:invoke>",
    section=("<atem:function_calls>", "</atem:function_calls>"),
    tagged=True,
    values=(("<atem:parameter", "</atem:parameter>"),),
    forms=(CallForm(re.compile(r'[^>]*?\bname="(?P<name>[^"]+)"[^>]*>'), fields=(_fields("atem:parameter"),)),),
    well_formed=lambda content: "<atem:invoke" not in content and _ordered(content),
)
"""Its texts can't be told from numbers, so its calls can't be bound."""
