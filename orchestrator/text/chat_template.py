"""Converts a conversation to the tokens of a prompt: by the model's template, or a plain form without one.

Knows the tokenizer's files, and no model.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError
from jinja2.meta import find_undeclared_variables

from orchestrator.text.mending import Conversation, mended
from orchestrator.text.template_sources import (
    environment,
    read_json,
    render_template,
    special_tokens,
    template_sources,
    words_of,
)
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import InputError

ChatMessage = Mapping[str, Any]
"""`role` and `content`, as OpenAI's API has them; content is text, or a list of text parts."""

_NAMES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
_FALLBACK_STOPS = ("\nUser:", "\nAssistant:", "\nSystem:", "\nTool:")
_INSTRUCTIONS = ("system", "developer")
_END = "\N{OBJECT REPLACEMENT CHARACTER}end-of-messages\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for the content of the last message, to find what the template puts before it."""


class Rendering(NamedTuple):
    """A conversation as the model reads it."""

    text: str
    left_out: tuple[str, ...] = ()
    """Roles of the messages whose content the model does not read, one for each message."""
    mended: tuple[str, ...] = ()
    """What was changed for the template, as sentences."""


class ChatTemplate:
    """Of one model folder. Raises InputError for a template that can't be read."""

    def __init__(self, folder: Path, codec: TextCodec | None = None) -> None:
        self.folder = folder
        self.codec = codec or TextCodec(folder)
        self._settings = settings = read_json(folder / "tokenizer_config.json")
        self._sources = template_sources(folder, settings)
        self._special = special_tokens(settings)
        self._compiled = {name: self._read(source) for name, source in self._sources.items()}

    @property
    def own(self) -> bool:
        """Whether the model brings a template; if not, conversations look like `plain`'s."""
        return bool(self._sources)

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer, beside the model's own end tokens."""
        return () if self.own else _FALLBACK_STOPS

    @property
    def tool_parser(self) -> str | None:
        """The parser of tool calls that the tokenizer's settings name, as converted models have it for mlx-lm."""
        name = self._settings.get("tool_parser_type")
        return name if isinstance(name, str) else None

    @property
    def variables(self) -> frozenset[str]:
        """Names that the template reads, for instance messages and enable_thinking."""
        source = self._sources.get("default")
        return frozenset() if source is None else frozenset(find_undeclared_variables(environment().parse(source)))

    def mentions(self, text: str) -> bool:
        """Whether `text` stands in the source of the template, or of that for tools."""
        return any(text in source for source in self._sources.values())

    def search(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The first match in these sources."""
        return next((found for source in self._sources.values() if (found := pattern.search(source))), None)

    @property
    def knows_tools(self) -> bool:
        """Whether the template says anything about `tools`."""
        source = self._sources.get(self._name(tools=True))
        return source is not None and "tools" in find_undeclared_variables(environment().parse(source))

    def text(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        answering: bool = True,
        **variables: Any,
    ) -> str:
        """The text of `render`."""
        return self.render(messages, tools, answering=answering, **variables).text

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        answering: bool = True,
        continued: bool = False,
        **variables: Any,
    ) -> Rendering:
        """The conversation as the model reads it, up to where its answer begins (`answering`), or up to the end of the
        last message, which the answer goes on with (`continued`). What the template refuses, and instructions that it
        would drop, are mended.

        `variables`: what else the template knows, for instance enable_thinking. Raises InputError for messages
        that it refuses however they are mended, and for content that is no text.
        """
        flat = [_flat(message) for message in messages]
        template = self._compiled.get(self._name(tools=bool(tools)))
        if template is None:
            if tools:
                raise InputError("This model has no chat template, so it knows no tools: leave them out.")
            begun = f" {flat[-1]['content']}" if continued else ""
            return Rendering(plain(flat[:-1] if continued else flat, answering or continued) + begun)
        known = {**self._special, "documents": None, **variables}

        def rendered(conversation: Conversation, answering: bool = answering and not continued) -> str:
            told = {
                "messages": conversation.messages,
                "tools": list(conversation.tools) if conversation.tools else None,
            }
            return render_template(template, add_generation_prompt=answering, **told, **known)

        found = mended(Conversation(flat, tools), rendered)
        if not continued:
            return Rendering(rendered(found.conversation), found.left_out, found.notes)
        *before, last = found.conversation.messages
        ended = rendered(found.conversation._replace(messages=[*before, {**last, "content": _END}]))
        head, there, _ = ended.rpartition(_END)
        text = head if there else rendered(found.conversation._replace(messages=before), True)
        return Rendering(text + last["content"], found.left_out, found.notes)

    def beginning(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> str:
        """What every conversation with these instructions and tools begins with; empty if it can't be told."""
        before = list(takewhile(lambda message: message.get("role") in _INSTRUCTIONS, messages))
        try:
            text = self.text([*before, {"role": "user", "content": _END}], tools, answering=False, **variables)
        except InputError:
            return ""
        head, there, _ = text.partition(_END)
        return head if there else ""

    def tokens(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> list[int]:
        """`text` as token ids. A model's own template contains its special tokens, so at most BOS is added."""
        text = self.text(messages, tools, **variables)
        return self.codec.encode_rendered(text) if self.own else self.codec.encode(text)

    def _name(self, tools: bool) -> str:
        """Some models have a template of its own for tools."""
        return "tool_use" if tools and "tool_use" in self._sources else "default"

    def _read(self, source: str) -> Template:
        try:
            return environment().from_string(source)
        except (TemplateError, RecursionError) as error:
            raise InputError(
                f"The chat template in {self.folder} is broken ({words_of(error)}): download the model again."
            ) from error


def has_template(folder: Path) -> bool:
    """Whether the model in `folder` brings a template. Does not load its tokenizer."""
    return bool(template_sources(folder, read_json(folder / "tokenizer_config.json")))


def plain(messages: Sequence[ChatMessage], answering: bool = True) -> str:
    """The form for a model without a template: the system text, then turns named "User:" and "Assistant:".

    A turn ends with a line break; the answer is to end before the next "\\nUser:".
    """
    turns = [
        str(message["content"]).strip() + "\n"
        if _NAMES[message["role"]] == "System"
        else f"{_NAMES[message['role']]}: {str(message['content']).strip()}"
        for message in messages
    ]
    return "\n".join([*turns, "Assistant:"] if answering else turns)


def _flat(message: ChatMessage) -> dict[str, Any]:
    """The message with its text parts joined. Raises InputError for content that is not text."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _NAMES:
        raise InputError(f"A message's role is {role!r} and must be one of {', '.join(_NAMES)}.")
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise InputError("A message has a part that is no text, and these models read only text: leave it out.")
        content = "".join(map(str, parts))
    if content is not None and not isinstance(content, str):
        raise InputError(f"A message's content is of type {type(content).__name__} and must be text.")
    return {**message, "content": content or ""}
