"""How a model writes tool calls, inferred from its chat template, and the parser of each syntax.

Syntaxes other than those in `_OWN` are parsed by the modules of mlx-lm's `tool_parsers`, which need neither MLX nor a
model.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from orchestrator.text.answer.mlx_tool_parsers import has_mlx_parser, mlx_parser
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
)
"""A syntax is the template's if one of its groups is in it completely; the first such syntax counts (mlx-lm's
`_infer_tool_parser`)."""
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
}
"""Markers that are special tokens in some models of a family."""


_NAMES = {
    **{name: name for name, _ in _TEMPLATE_MARKS},
    "laguna": "glm47",
    "json_tools": "json",
}
"""Names that a model's settings may have for a syntax."""


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}
    id: str | None = None


class _OwnSyntax(NamedTuple):
    start: str
    end: str
    parse: Callable[[str, Any], Any]
    """Gets the text between two markers; raises ValueError or LookupError."""


def _json_call(content: str, _tools: Tools) -> Any:
    return msgspec.json.decode(content.strip())


def _llama_call(content: str, _tools: Tools) -> Any:
    found, end = json.JSONDecoder().raw_decode(_LLAMA_START + content)
    if content[end - len(_LLAMA_START) :].strip(" \n;"):
        raise ValueError("text follows the call")
    return {"name": found["name"], "arguments": found["parameters"]}


_LLAMA_START = '{"name":'
_OWN = {
    "json": _OwnSyntax("<tool_call>", "</tool_call>", _json_call),
    "llama3": _OwnSyntax(_LLAMA_START, "", _llama_call),
}


@dataclass(frozen=True)
class ToolSyntax:
    """One way to write tool calls."""

    name: str

    @property
    def enforceable(self) -> bool:
        """Whether calls can be held to the schemas of their functions while decoding."""
        return self.name == "json"

    @property
    def start(self) -> str:
        return _OWN[self.name].start if self.name in _OWN else self._module.tool_call_start

    @property
    def end(self) -> str:
        """Empty: a call ends where the next one begins, or with the answer."""
        return _OWN[self.name].end if self.name in _OWN else self._module.tool_call_end

    @property
    def tokens(self) -> tuple[str, ...]:
        """Markers that may be special tokens, whose text must be shown to be parsed."""
        return _TOKENS.get(self.name, (self.start, self.end))

    def calls(self, content: str, tools: Tools) -> list[Call] | None:
        """The calls between two markers; None if they are malformed."""
        try:
            known = [_with_parameters(tool) for tool in tools]
            found = self._parse(content, known)
            calls = msgspec.convert(found if isinstance(found, list) else [found], list[_Call])
            return [Call(one.name, msgspec.json.encode(one.arguments).decode(), one.id) for one in calls] or None
        # The parsers raise Python's own errors for malformed calls, which models do write.
        except (ValueError, TypeError, LookupError, AttributeError, SyntaxError, RecursionError, NotImplementedError):
            return None

    @cached_property
    def _module(self) -> ModuleType:
        return mlx_parser(self.name)

    @property
    def _parse(self) -> Callable[[str, Any], Any]:
        return _OWN[self.name].parse if self.name in _OWN else self._module.parse_tool_call


JSON_SYNTAX = ToolSyntax("json")
"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write it."""


def _with_parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parsers look for the parameters of each function, which a function without any may leave out."""
    function = tool["function"]
    return {**tool, "function": {**function, "parameters": function.get("parameters") or {}}}


def infer_tool_syntax(template: ChatTemplate) -> ToolSyntax | None:
    """The syntax that the model's template teaches; None if it knows no tools, or no syntax that is known here."""
    name = _syntax_name(template) if template.knows_tools else None
    known = name in _OWN or (name is not None and has_mlx_parser(name))
    return ToolSyntax(name) if name is not None and known else None


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
