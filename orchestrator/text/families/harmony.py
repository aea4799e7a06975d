"""OpenAI's Harmony format, which gpt-oss models write: messages with a channel and perhaps a recipient. Pure.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`; the prompt ends with the
first `<|start|>assistant`. A call is a message to a function: `<|channel|>commentary to=functions.add<|message|>{...}`.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from orchestrator.text.answer.bound_calls import Functions, Marks, bounded, require_small
from orchestrator.text.answer.call_stream import OBJECT, CallForm
from orchestrator.text.answer.call_syntax import CallLimit, CallStream, CallSyntax, Tools
from orchestrator.text.answer.parameters import Function, Parameters
from orchestrator.text.answer.parts import Part, Reasoning, Spoken, ThoughtSpan
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.stop_scanner import StopScanner
from orchestrator.text.tokenizer import TextCodec
from protocol.messages.grammar import Calls, Form, Grammar, Json, OneOf, Text

_START, _CHANNEL, _MESSAGE, _END, _CALL = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
_MARKERS = (_START, _CHANNEL, _MESSAGE, _END, _CALL)
HARMONY_TOKENS = (*_MARKERS, "<|constrain|>")
"""Special tokens whose text must be shown to be parsed."""
_FUNCTIONS = "functions."
_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")
_BARE_CALL = re.compile(r"\s*(?P<header>(?=<\||to=)[^{]*\bto=[^{]+)(?P<arguments>\{.*)", re.DOTALL)
"""Some calls have no marker before their arguments."""
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")

_Body = Literal["reasoning", "spoken", "call"]

HARMONY_THOUGHT = f"{_CHANNEL}analysis{_MESSAGE}", _END
"""What begins a thought, and what ends it."""
HARMONY_ANSWER = f"{_CHANNEL}final{_MESSAGE}"
"""What comes before the answer's text."""
HARMONY_CLOSING = f"{_END}{_START}assistant{HARMONY_ANSWER}"
"""Ends a thought and begins the answer."""
HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high"}
"""Efforts that the models do not know."""


def writes_harmony(template: ChatTemplate) -> bool:
    """Whether the model's template has Harmony's messages."""
    return all(template.mentions(mark) for mark in (_START, _CHANNEL, _MESSAGE))


class HarmonyParser:
    """Reasoning is the analysis channel; text is the final channel and commentary to no function."""

    def __init__(self, tools: Tools, most: int | None) -> None:
        """`tools`: those that are offered; without, a call is reasoning. `most`: as of MarkedParser."""
        self._tools = tools
        self._kept = CallLimit(most).kept
        self._body: _Body | None = None
        """The kind of the message at hand; None in a header."""
        self._stream: CallStream | None = None
        """Of the call at hand."""
        self._content = ""
        """Of the header at hand."""
        self._scanner = StopScanner(_MARKERS)
        self._seen = 0
        self.thoughts = [ThoughtSpan(0)]

    def push(self, text: str) -> Sequence[Part]:
        self._seen += len(text)
        parts: list[Part] = []
        while True:
            place = self._seen - len(self._scanner.held) - len(text)
            before, found = self._scanner.push(text)
            parts += self._add(before, place)
            if not found:
                return parts
            text = self._scanner.rest
            parts += self._cross(self._scanner.found or "", self._seen - len(text))

    def finish(self) -> Sequence[Part]:
        held = self._scanner.flush()
        parts = self._add(held, self._seen - len(held))
        if self._body is not None:
            return [*parts, *self._end(marked=False)]
        header, self._content = self._content, ""
        return [] if header.startswith((_START, _CHANNEL)) else _parts("spoken", header)

    def _add(self, text: str, place: int) -> list[Part]:
        """`place`: characters of output before `text`."""
        self._content += text
        if self._body is None and "{" in text and (bare := _BARE_CALL.match(self._content)):
            self._content = bare["header"]
            self._read_header(place + len(text) - len(bare["arguments"]))
            self._content += bare["arguments"]
        if self._body is None and not _may_be_header(self._content):
            self._begin("spoken", place + len(text) - len(self._content))
        if self._body is None:
            return []
        text, self._content = self._content, ""
        if self._stream is not None:
            return [*self._kept(self._stream.push(text))]
        return _parts(self._body, text)

    def _cross(self, marker: str, place: int) -> list[Part]:
        """`place`: characters of output up to the end of `marker`."""
        parts: list[Part] = []
        if marker == _MESSAGE and self._body is None:
            self._read_header(place)
        elif marker != _MESSAGE and self._body is not None:
            parts = self._end(marked=True)
        if self._body is None:
            # A header begins at _START or _CHANNEL.
            before = self._content if marker == _CHANNEL else ""
            self._content = before + marker if marker in (_START, _CHANNEL) else ""
        return parts

    def _read_header(self, place: int) -> None:
        header, self._content = self._content, ""
        channel, to = _NAME.search(header), _RECIPIENT.search(header)
        name, analysis = to[1] if to else "", channel is not None and channel[1] == "analysis"
        recipient = name.removeprefix(_FUNCTIONS)
        if any(tool["function"]["name"] == recipient for tool in self._tools):
            self._begin("call", place)
            self._stream = CallStream(_CALLS, self._tools)
            self._stream.push(recipient + "\n")
        elif self._tools and name and (name.startswith(_FUNCTIONS) or not analysis):
            self._begin("spoken", place)
            self._content = f"{name} "
        elif name or analysis:
            self._body = "reasoning"
        else:
            self._begin("spoken", place)

    def _begin(self, body: _Body, place: int) -> None:
        self._body = body
        if self.thoughts == [ThoughtSpan(0)]:
            self.thoughts = [ThoughtSpan(0, place)]

    def _end(self, *, marked: bool) -> list[Part]:
        """End the message at hand. A malformed call is text, unless it was begun."""
        stream, self._body, self._stream = self._stream, None, None
        if stream is None:
            return []
        found = stream.finish(marked=marked)
        if found is None:
            return _parts("spoken", stream.content.partition("\n")[2])
        return [*self._kept(found.calls), *_parts("spoken", found.rest.strip())]


_CALLS = CallSyntax("harmony", "", "", forms=(CallForm(re.compile(r"(?P<name>\S+)" + OBJECT), alone="{}"),))
"""The recipient, a line break, and the arguments."""


def _may_be_header(text: str) -> bool:
    text = text.lstrip()
    return any(text.startswith(head) or head.startswith(text) for head in (_START, _CHANNEL, "to="))


def _parts(body: _Body | None, text: str) -> list[Part]:
    if not text:
        return []
    return [Reasoning(text) if body == "reasoning" else Spoken(text)]


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
        return (*self._marks.form(HARMONY_ANSWER), content)

    def _message(self, header: str) -> Form:
        """A message before the last one."""
        text = self._marks.text_up_to("<|end|>", tuple(mark for mark in HARMONY_TOKENS if mark != "<|end|>"))
        return (*self._marks.form(header + _MESSAGE), text, *self._marks.form(_START + "assistant"))
