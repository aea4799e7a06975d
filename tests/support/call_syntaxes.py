"""How models write calls in each syntax, by the name of the syntax."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

dumps = partial(json.dumps, ensure_ascii=False)


class Syntax(NamedTuple):
    template: str
    """What its chat template has beside the tools."""
    marks: tuple[str, ...]
    call: Callable[[str, Any], str]
    """PLACE in it is the number of the call."""
    between: str = ""
    around: tuple[str, ...] = ("", "")

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        said = (self.call(*call).replace("PLACE", str(place)) for place, call in enumerate(calls))
        return self.around[0] + self.between.join(said) + self.around[1]


def _json(name: str, arguments: Any, key: str = "arguments") -> str:
    return dumps({"name": name, key: arguments})


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def _fields(arguments: dict[str, Any], form: str) -> str:
    """Each with its KEY and its VALUE in this form."""
    return "".join(form.replace("KEY", key).replace("VALUE", _raw(value)) for key, value in arguments.items())


def _glm(gap: str) -> Callable[[str, Any], str]:
    form = f"<arg_key>KEY</arg_key>{gap}<arg_value>VALUE</arg_value>{gap}"
    return lambda name, arguments: f"<tool_call>{name}{gap}{_fields(arguments, form)}</tool_call>"


def _longcat(text: str) -> str:
    return text.replace("arg_", "longcat_arg_").replace("tool_", "longcat_tool_")


def _bare(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return f"{{{','.join(f'{key}:{_bare(one, quote)}' for key, one in sorted(value.items()))}}}"
        case list():
            return f"[{','.join(_bare(one, quote) for one in value)}]"
        case _:
            return dumps(value)


GLM = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
DEEPSEEK = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
KIMI = tuple(
    f"<|tool_call{name}|>" for name in ("s_section_begin", "s_section_end", "_begin", "_end", "_argument_begin")
)
QUOTE = '<|"|>'
HERMES = ("<tool_call>", "</tool_call>")
MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")
_, _, BEGIN, END, SEPARATOR = DEEPSEEK
SYNTAXES = {
    "json": Syntax(
        '<tool_call>{"name": ..., "arguments": ...}</tool_call>',
        HERMES,
        lambda *call: f"<tool_call>\n{_json(*call)}\n</tool_call>",
        "\n",
    ),
    "llama3": Syntax(
        '"parameters": dictionary of argument name', (), lambda *call: _json(*call, key="parameters"), "\n"
    ),
    "mistral": Syntax(
        "[TOOL_CALLS] [ARGS]",
        ("[TOOL_CALLS]", "[ARGS]"),
        lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}",
    ),
    "older mistral": Syntax("[TOOL_CALLS]", ("[TOOL_CALLS]",), _json, ", ", ("[TOOL_CALLS] [", "]")),
    "deepseek v3": Syntax(
        f"{BEGIN}{SEPARATOR}```json",
        DEEPSEEK,
        lambda name, arguments: f"{BEGIN}function{SEPARATOR}{name}\n```json\n{dumps(arguments)}\n```{END}",
        "\n",
        DEEPSEEK[:2],
    ),
    "deepseek": Syntax(
        f"{BEGIN}{SEPARATOR}",
        DEEPSEEK,
        lambda name, arguments: f"{BEGIN}{name}{SEPARATOR}{dumps(arguments)}{END}",
        around=DEEPSEEK[:2],
    ),
    "qwen3_coder": Syntax(
        "<tool_call>\n<function=",
        HERMES,
        lambda name, arguments: (
            f"<tool_call>\n<function={name}>\n"
            + _fields(arguments, "<parameter=KEY>\nVALUE\n</parameter>\n")
            + "</function>\n</tool_call>"
        ),
        "\n",
    ),
    "glm47": Syntax("<arg_key>", GLM, _glm("")),
    "glm 4.5": Syntax("<arg_key></arg_key>\n<arg_value>", GLM, _glm("\n"), "\n"),
    "longcat": Syntax(
        "<longcat_tool_call>", tuple(map(_longcat, GLM)), lambda *call: _longcat(_glm("\n")(*call)), "\n"
    ),
    "minimax_m2": Syntax(
        "<minimax:tool_call>",
        MINIMAX,
        lambda name, arguments: (
            f'<invoke name="{name}">\n' + _fields(arguments, '<parameter name="KEY">VALUE</parameter>\n') + "</invoke>"
        ),
        "\n",
        (f"{MINIMAX[0]}\n", f"\n{MINIMAX[1]}"),
    ),
    "minicpm5": Syntax(
        '<function name="<param name="',
        (),
        lambda name, arguments: (
            f'<function name="{name}">' + _fields(arguments, '<param name="KEY">VALUE</param>') + "</function>"
        ),
    ),
    "kimi_k2": Syntax(
        KIMI[0],
        KIMI,
        lambda name, arguments: f"{KIMI[2]}functions.{name}:PLACE{KIMI[4]}{dumps(arguments)}{KIMI[3]}",
        around=KIMI[:2],
    ),
    "gemma4": Syntax(
        "<|tool_call><tool_call|>",
        ("<|tool_call>", "<tool_call|>", QUOTE),
        lambda name, arguments: f"<|tool_call>call:{name}{_bare(arguments, QUOTE)}<tool_call|>",
    ),
    "function_gemma": Syntax(
        "<start_function_call>",
        ("<start_function_call>", "<end_function_call>", "<escape>"),
        lambda name, arguments: f"<start_function_call>call:{name}{_bare(arguments, '<escape>')}<end_function_call>",
    ),
    "pythonic": Syntax(
        "<|tool_call_start|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        lambda name, arguments: f"{name}({', '.join(f'{key}={dumps(value)}' for key, value in arguments.items())})",
        ", ",
        ("<|tool_call_start|>[", "]<|tool_call_end|>"),
    ),
}
"""The second ones of a name are older forms of it."""


def _k3(name: str, arguments: dict[str, Any]) -> str:
    fields = "".join(
        f'<|open|>argument key="{key}" type="{"string" if isinstance(value, str) else "number"}"<|sep|>'
        f"{_raw(value)}<|close|>argument<|sep|>"
        for key, value in arguments.items()
    )
    return f'<|open|>call tool="{name}" index="1"<|sep|>{fields}<|close|>call<|sep|>'


def _muse(name: str, arguments: dict[str, Any]) -> str:
    fields = _fields(arguments, '<atem:parameter name="KEY">VALUE</atem:parameter>\n')
    return f'<atem:invoke name="{name}">\n{fields}</atem:invoke>'


UNBOUND = {
    "kimi_k3": Syntax("", (), _k3, around=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")),
    "muse_spark": Syntax("", (), _muse, around=("<atem:function_calls>\n", "\n</atem:function_calls>")),
}
"""Those that no grammar writes."""
