"""Calls in OpenAI's Harmony format, which gpt-oss models write, as grammars. Pure.

A call is a message to a function and ends the answer, so there is one. Reasoning, and a text to the user, are messages
before it. The answer without a call is a message on the channel `final`.
"""

from collections.abc import Iterable

from orchestrator.text.answer.bound_calls.marks import Marks
from orchestrator.text.answer.bound_calls.writers import Functions, bounded, require_small
from orchestrator.text.answer.harmony import HARMONY_TOKENS
from orchestrator.text.answer.parameters import Function, Parameters
from orchestrator.text.tokenizer import TextCodec
from protocol.messages.grammar import Calls, Form, Grammar, Json, OneOf, Text

_MESSAGE, _NEXT = "<|message|>", "<|start|>assistant"


class HarmonyCalls:
    """Of a model with these tokens. The prompt ends with `<|start|>assistant`."""

    def __init__(self, codec: TextCodec) -> None:
        self._marks = Marks.of(HARMONY_TOKENS, codec)

    def demanded(self, functions: Functions, *, several: bool) -> Grammar:
        """`several` has no effect."""
        return self._grammar(self._calls(functions))

    def optional(self, functions: Functions) -> Grammar:
        return self._grammar([*self._calls(functions), self._final(Text(never=HARMONY_TOKENS))])

    def or_value(self, functions: Functions, schema: str, *, several: bool) -> Grammar:
        return self._grammar([*self._calls(functions), self._final(Json(schema))])

    def _grammar(self, forms: Iterable[Form]) -> Grammar:
        reasoning, spoken = (self._message(f"<|channel|>{channel}") for channel in ("analysis", "commentary"))
        return Grammar("", bounded(Calls(tuple(forms), opening=(OneOf((reasoning, ())), OneOf((spoken, ()))))))

    def _calls(self, functions: Functions) -> list[Form]:
        require_small(functions)
        return [*map(self._call, functions)]

    def _call(self, function: Function) -> Form:
        recipient = f" to=functions.{function['name']}"
        # The models write the recipient behind the channel; the template writes it before.
        headers = (f"<|channel|>commentary{recipient} <|constrain|>json", f"{recipient}<|channel|>commentary json")
        arguments = Json(Parameters(function).json_schema())
        return (OneOf(tuple(map(self._marks.form, headers))), *self._marks.form(_MESSAGE), arguments)

    def _final(self, content: Json | Text) -> Form:
        return (*self._marks.form("<|channel|>final" + _MESSAGE), content)

    def _message(self, header: str) -> Form:
        """A message before the last one."""
        text = self._marks.text_up_to("<|end|>", tuple(mark for mark in HARMONY_TOKENS if mark != "<|end|>"))
        return (*self._marks.form(header + _MESSAGE), text, *self._marks.form(_NEXT))
