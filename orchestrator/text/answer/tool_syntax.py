"""How models write tool calls, and the parser of each syntax. Pure.

Syntaxes other than those in `OWN_SYNTAXES` are parsed by the modules of mlx-lm's `tool_parsers`, which need neither MLX
nor a model.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from orchestrator.text.answer.parameters import ALL_TYPES, Parameters, Types, read_as
from orchestrator.text.answer.parts import Call
from orchestrator.text.answer.tool_parsers import OWN_SYNTAXES, ReadCalls, has_mlx_parser, mlx_parser
from orchestrator.text.chat_template import ChatTemplate
from protocol.errors import InputError

Tools = Sequence[Mapping[str, Any]]
"""As chat requests of OpenAI's API have them."""

TEXT_ARGUMENTS = frozenset(("qwen3_coder", "glm47", "longcat", "minimax_m2", "minicpm5"))
"""Syntaxes in which arguments are texts without quotes."""
TOKENS = {
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "pythonic": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    ),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "longcat": (
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        "<longcat_arg_key>",
        "</longcat_arg_key>",
        "<longcat_arg_value>",
        "</longcat_arg_value>",
    ),
    "glm47": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "deepseek": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
}
"""Markers that are special tokens in some models of a family."""


_MALFORMED = (
    ValueError,
    ArithmeticError,
    TypeError,
    LookupError,
    AttributeError,
    SyntaxError,
    RecursionError,
    MemoryError,
    NotImplementedError,
)
"""What the parsers raise for malformed calls, which models do write."""


_SECTION_CALLS = {
    "kimi_k2": ("<|tool_call_begin|>", "<|tool_call_end|>"),
    "kimi_k3": ("<|open|>call", "<|close|>call<|sep|>"),
    "minimax_m2": ("<invoke name=", "</invoke>"),
    "muse_spark": ("<atem:invoke", "</atem:invoke>"),
}
"""Markers of one call, where mlx-lm's parser reads a section of calls: each is returned when it is complete."""
_LAST_MARKS = {
    "glm47": ("<arg_key>", "<arg_value>", "</arg_value>"),
    "longcat": ("<longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>"),
    "muse_spark": ("<atem:parameter", "</atem:parameter>"),
    "function_gemma": ("call:", "}"),
}
"""The order of the last mark of each kind. In another order, the parser searches each earlier one's end in vain."""
_KIMI_K3_MARK = re.compile(r"<\|(o|c|s)(?:pen|lose|ep)\|>")
_KIMI_K3_ORDER = re.compile(r"s(?:oscs)*")
"""Markers in a call: its own header ends, then arguments open and close."""
_CUT_CALLS = 8
"""The most places at which a list of Python calls is tried to end."""


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}
    id: str | None = None


class FoundCalls(NamedTuple):
    """Calls between two markers, and the text behind them that belongs to none."""

    calls: list[Call]
    rest: str


@dataclass(frozen=True)
class ToolSyntax:
    """One way to write tool calls."""

    name: str

    @property
    def start(self) -> str:
        return self._call_markers[0]

    @property
    def end(self) -> str:
        """Empty: a call ends where the next one begins, or with the answer."""
        return self._call_markers[1]

    @property
    def section(self) -> tuple[str, str] | None:
        """Markers around all calls, in syntaxes that have them. Calls without them count too."""
        if self.name in OWN_SYNTAXES:
            return OWN_SYNTAXES[self.name].section
        return _markers(self._module) if self.name in _SECTION_CALLS else None

    @cached_property
    def _call_markers(self) -> tuple[str, str]:
        if own := OWN_SYNTAXES.get(self.name):
            return own.start, own.end
        return _SECTION_CALLS.get(self.name) or _markers(self._module)

    @property
    def tokens(self) -> tuple[str, ...]:
        """Markers that may be special tokens, whose text must be shown to be parsed."""
        return TOKENS.get(self.name, (self.start, self.end))

    def read_cut(self, content: str, tools: Tools) -> FoundCalls | None:
        """What stands behind a start marker whose end marker is missing; None if it has no complete call."""
        if self.name in ("json", "gemma4") or not self.end:
            return self.read(content, tools)
        ends = [found.end() for found in re.finditer(r"\)", content)] if self.name == "pythonic" else []
        for end in reversed(ends[-_CUT_CALLS:]):
            listed = content[:end] + "]"
            if _is_python(listed) and (found := self.read(listed, tools)):
                return FoundCalls(found.calls, content[end:])
        return None

    def read(self, content: str, tools: Tools) -> FoundCalls | None:
        """What stands between two markers; None if it is malformed."""
        if not self._well_formed(content):
            return None
        try:
            found, rest = self._read(content, tools)
            calls = [Call(one.name, _written(one.arguments), one.id) for one in msgspec.convert(found, list[_Call])]
        except _MALFORMED:
            return None
        return FoundCalls(calls, rest) if calls and self._plausible(calls, tools) else None

    def _well_formed(self, content: str) -> bool:
        """False for what a parser would read too loosely, or search again and again for what is not there."""
        if self.name == "kimi_k3":
            marks = "".join(_KIMI_K3_MARK.findall(content))
            return _KIMI_K3_ORDER.fullmatch(marks) is not None
        if self.name == "muse_spark" and self.start in content:
            return False
        last = [content.rfind(mark) for mark in _LAST_MARKS.get(self.name, ())]
        return last == sorted(last)

    def _plausible(self, calls: Sequence[Call], tools: Tools) -> bool:
        """False for text that is no call: these parsers make one of any text, or have markers that others use too."""
        if self.name not in ("glm47", "minimax_m2"):
            return True
        return {call.name for call in calls} <= {tool["function"]["name"] for tool in tools}

    def _read(self, content: str, tools: Tools) -> ReadCalls:
        if self.name in OWN_SYNTAXES:
            return OWN_SYNTAXES[self.name].read(content)
        if self.name == "longcat" and content.strip() in {tool["function"]["name"] for tool in tools}:
            # mlx-lm's parser reads no call without arguments.
            return ReadCalls([{"name": content.strip(), "arguments": {}}])
        texts = self.name in TEXT_ARGUMENTS
        known = [_with_types(tool) if texts else _with_parameters(tool) for tool in tools]
        if self.name in _SECTION_CALLS:
            content = self.start + content + self.end
        found = self._module.parse_tool_call(content, known)
        calls = found if isinstance(found, list) else [found]
        return ReadCalls([_as_types(call, tools) for call in calls] if texts else calls)

    @cached_property
    def _module(self) -> ModuleType:
        return mlx_parser(self.name)


JSON_SYNTAX = ToolSyntax("json")
"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write it."""


def _written(arguments: dict[str, Any]) -> str:
    """As JSON. Raises ValueError or TypeError for values that it does not have."""
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Half a pair of surrogates has no encoding.
    written.encode()
    return written


def _markers(module: ModuleType) -> tuple[str, str]:
    return module.tool_call_start, module.tool_call_end


def _is_python(text: str) -> bool:
    try:
        ast.parse(text.strip(), mode="eval")
    except _MALFORMED:
        return False
    return True


def _with_types(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tool with one type for each parameter, by which a parser takes the text as it is or reads a value."""
    parameters = Parameters(tool["function"])
    properties = {name: _parsed_type(parameters.types(schema)) for name, schema, _ in parameters.members()}
    return {**tool, "function": {**tool["function"], "parameters": {"properties": properties}}}


def _parsed_type(types: Types) -> Mapping[str, Any]:
    if types == ALL_TYPES:
        return {}
    if "string" in types:
        return {"type": "string"}
    return {"type": "boolean" if types == {"boolean"} else "object"}


def _as_types(call: Any, tools: Tools) -> Any:
    function = next((tool["function"] for tool in tools if tool["function"]["name"] == call["name"]), None)
    if function is None:
        return call
    parameters = Parameters(function)
    types = {name: parameters.types(schema) for name, schema, _ in parameters.members()}
    arguments = {name: read_as(value, types.get(name, ALL_TYPES)) for name, value in call["arguments"].items()}
    return {**call, "arguments": arguments}


def _with_parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parsers look for the parameters of each function, which a function without any may leave out."""
    function = tool["function"]
    return {**tool, "function": {**function, "parameters": function.get("parameters") or {}}}


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
