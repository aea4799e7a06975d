"""The syntax of a model's tool calls, inferred from its chat template."""

from orchestrator.text.answer.mlx_tool_parsers import has_mlx_parser
from orchestrator.text.answer.own_tool_parsers import OWN_SYNTAXES
from orchestrator.text.answer.tool_syntax import JSON_SYNTAX, TOKENS, ToolSyntax
from orchestrator.text.chat_template import ChatTemplate
from protocol.errors import InputError

_PROBE = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}
_TEMPLATE_MARKS: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("minimax_m2", (("<minimax:tool_call>",),)),
    ("gemma4", (("<|tool_call>", "<tool_call|>"),)),
    ("function_gemma", (("<start_function_call>",),)),
    ("longcat", (("<longcat_tool_call>",),)),
    ("glm47", (("<arg_key>",),)),
    ("pythonic", (("<|tool_list_start|>",), ("<|tool_call_start|>",))),
    ("qwen3_coder", (("<tool_call>\\n<function=",), ("<tool_call>\n<function=",))),
    ("kimi_k2", (("<|tool_calls_section_begin|>",),)),
    ("minicpm5", (('<function name="', '<param name="'),)),
    ("mistral", (("[TOOL_CALLS]",),)),
    ("llama3", (('"parameters": dictionary of argument name',),)),
    ("muse_spark", (("<atem:function_calls>",),)),
    ("kimi_k3", (("<|open|>", "<|close|>", "<|sep|>"),)),
    ("deepseek", (("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),)),
)
"""A syntax is the template's if one of its groups is in it completely; the first such syntax counts (mlx-lm's
`_infer_tool_parser`, which has no DeepSeek)."""
_NAMES = {
    **{name: name for name, _ in _TEMPLATE_MARKS},
    "laguna": "glm47",
    "json_tools": "json",
}
"""Names that a model's settings may have for a syntax."""


def infer_tool_syntax(template: ChatTemplate) -> ToolSyntax | None:
    """The syntax that the model's template teaches; None if it knows no tools, or no syntax that is known here."""
    name = _syntax_name(template) if template.knows_tools or _shows_calls_alone(template) else None
    known = name in OWN_SYNTAXES or (name is not None and has_mlx_parser(name))
    return ToolSyntax(name) if name is not None and known else None


def _shows_calls_alone(template: ChatTemplate) -> bool:
    """DeepSeek's templates show calls and results. The tools are left to the system message."""
    return any(template.mentions(mark) for name, groups in _TEMPLATE_MARKS if name == "deepseek" for mark in groups[0])


def _syntax_name(template: ChatTemplate) -> str | None:
    if template.tool_parser in _NAMES:
        return _NAMES[template.tool_parser]
    for name, groups in _TEMPLATE_MARKS:
        if any(all(template.mentions(mark) for mark in group) for group in groups):
            return name
    try:
        text = template.text([{"role": "user", "content": ""}], [_PROBE])
    except InputError:
        text = ""
    if "<tool_call>" in text and '"arguments"' in text:
        return JSON_SYNTAX.name
    # The templates of some LFM2 models show no call.
    tokens = TOKENS["pythonic"]
    return "pythonic" if all(template.codec.id_of(token) is not None for token in tokens) else None
