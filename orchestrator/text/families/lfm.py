"""LFM2: a list of Python calls, which mlx-lm calls pythonic."""

import re

from orchestrator.text.answer.bound_calls import PythonArguments, Style
from orchestrator.text.answer.call_stream import CallForm
from orchestrator.text.answer.call_syntax import CallSyntax
from orchestrator.text.chat_template import ChatTemplate

_START, _END = "<|tool_call_start|>", "<|tool_call_end|>"
_OUTSIDE = {"(": "{", ")": "}", "=": ":"}


class _PythonTexts:
    """Keyword arguments become members of an object, and texts those of JSON."""

    def __init__(self) -> None:
        self._quote = ""
        self._escaped = False

    def __call__(self, text: str) -> str:
        return "".join(map(self._letter, text))

    def _letter(self, letter: str) -> str:
        if not self._quote:
            self._quote = letter if letter in "\"'" else ""
            return '"' if self._quote else _OUTSIDE.get(letter, letter)
        if self._escaped or letter == "\\":
            self._escaped = not self._escaped
            return "" if self._escaped else letter if letter == "'" else "\\" + letter
        if letter == self._quote:
            self._quote = ""
            return '"'
        return '\\"' if letter == '"' else letter


def _has_tokens(template: ChatTemplate) -> bool:
    """The templates of some of these models show no call."""
    return all(template.codec.id_of(token) is not None for token in (_START, _END))


LFM = CallSyntax(
    "pythonic",
    _START,
    _END,
    template_marks=(("<|tool_list_start|>",), (_START,)),
    fallback_sign=_has_tokens,
    values=(('"', '"'), ("'", "'")),
    forms=(CallForm(re.compile(r"[\[,\s]*(?P<name>[\w.]+)(?=\{)"), r"\s*\]"),),
    translator=_PythonTexts,
    style=Style(PythonArguments(), opening=_START + "[", separator=", ", closing="]" + _END),
)
