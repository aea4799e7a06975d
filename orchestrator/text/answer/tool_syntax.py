"""How a model writes tool calls, inferred from its chat template, and the parser of each syntax.

Syntaxes other than those in `OWN_SYNTAXES` are parsed by the modules of mlx-lm's `tool_parsers`, which need neither MLX
nor a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from orchestrator.text.answer.mlx_tool_parsers import has_mlx_parser, mlx_parser
from orchestrator.text.answer.own_tool_parsers import OWN_SYNTAXES, Reading
from orchestrator.text.answer.parameters import ALL_TYPES, Parameters, Types, read_as
from orchestrator.text.answer.parts import Call
from orchestrator.text.chat_template import ChatTemplate
from protocol.errors import InputError

Tools = Sequence[Mapping[str, Any]]
"""As chat requests of OpenAI's API have them."""

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
TEXT_ARGUMENTS = frozenset(("qwen3_coder", "glm47", "longcat", "minimax_m2", "minicpm5"))
"""Syntaxes in which arguments are texts without quotes."""
_TOKENS = {
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


_NAMES = {
    **{name: name for name, _ in _TEMPLATE_MARKS},
    "laguna": "glm47",
    "json_tools": "json",
}
"""Names that a model's settings may have for a syntax."""


_MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    SyntaxError,
    RecursionError,
    MemoryError,
    NotImplementedError,
)
"""What the parsers raise for malformed calls, which models do write."""


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}
    id: str | None = None


class Found(NamedTuple):
    """Calls between two markers, and the text behind them that belongs to none."""

    calls: list[Call]
    rest: str


@dataclass(frozen=True)
class ToolSyntax:
    """One way to write tool calls."""

    name: str

    @property
    def shows_its_end(self) -> bool:
        """Whether a call without its end marker shows if it is complete."""
        return self.name == "json" or not self.end

    @property
    def start(self) -> str:
        return OWN_SYNTAXES[self.name].start if self.name in OWN_SYNTAXES else self._module.tool_call_start

    @property
    def end(self) -> str:
        """Empty: a call ends where the next one begins, or with the answer."""
        return OWN_SYNTAXES[self.name].end if self.name in OWN_SYNTAXES else self._module.tool_call_end

    @property
    def wrappers(self) -> tuple[str, ...]:
        """Markers around all calls, which are dropped."""
        return OWN_SYNTAXES[self.name].wrappers if self.name in OWN_SYNTAXES else ()

    @property
    def tokens(self) -> tuple[str, ...]:
        """Markers that may be special tokens, whose text must be shown to be parsed."""
        return _TOKENS.get(self.name, (self.start, self.end))

    def read(self, content: str, tools: Tools) -> Found | None:
        """What stands between two markers; None if it is malformed."""
        try:
            found, rest = self._read(content, tools)
            calls = [
                Call(one.name, msgspec.json.encode(one.arguments).decode(), one.id)
                for one in msgspec.convert(found, list[_Call])
            ]
        except _MALFORMED:
            return None
        return Found(calls, rest) if calls and self._plausible(content, calls, tools) else None

    def _plausible(self, content: str, calls: Sequence[Call], tools: Tools) -> bool:
        """Whether the parser has read what is there: some make a call of any text, or skip a call that is broken."""
        if self.name == "glm47":
            return {call.name for call in calls} <= {tool["function"]["name"] for tool in tools}
        return self.name != "kimi_k3" or content.count("<|open|>call") == len(calls)

    def _read(self, content: str, tools: Tools) -> Reading:
        if self.name in OWN_SYNTAXES:
            return OWN_SYNTAXES[self.name].read(content)
        if self.name == "longcat" and content.strip() in {tool["function"]["name"] for tool in tools}:
            # mlx-lm's parser reads no call without arguments.
            return Reading([{"name": content.strip(), "arguments": {}}])
        texts = self.name in TEXT_ARGUMENTS
        known = [_with_types(tool) if texts else _with_parameters(tool) for tool in tools]
        found = self._module.parse_tool_call(content, known)
        calls = found if isinstance(found, list) else [found]
        return Reading([_as_types(call, tools) for call in calls] if texts else calls)

    @cached_property
    def _module(self) -> ModuleType:
        return mlx_parser(self.name)


JSON_SYNTAX = ToolSyntax("json")
"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write it."""


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
    tokens = _TOKENS["pythonic"]
    return "pythonic" if all(template.codec.id_of(token) is not None for token in tokens) else None
