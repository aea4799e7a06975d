"""Converts a conversation to the tokens of a prompt: by the model's template, or a plain form without one.

Knows the tokenizer's files, and no model.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError
from jinja2.meta import find_undeclared_variables

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

Messages = Sequence[dict[str, Any]]
"""With texts as contents."""
_INSTRUCTIONS = ("system", "developer")


class Placed(NamedTuple):
    """A conversation in the form that a template renders best."""

    messages: Messages
    left_out: tuple[str, ...] = ()
    """Roles of the messages whose content the template does not render, one for each message."""


def place_instructions(messages: Messages, render: Callable[[Messages], str]) -> Placed:
    """`messages` in the first form in which the template renders all instructions: as they are; with system for
    developer; with all instructions joined as the first message; joined at the beginning of the first user message.

    If no form has them all, it is the one that has most. `render` raises InputError for messages that the template
    refuses. If it refuses every form, `messages` are returned as they are.
    """
    marked = [_marked(message, _mark(place)) for place, message in enumerate(messages)]
    best, fewest = Placed(messages), len(messages) + 1
    for form in _FORMS:
        try:
            text = render(form(marked))
        except InputError:
            continue
        left_out = _left_out(messages, text)
        lost = sum(role in _INSTRUCTIONS for role in left_out)
        if lost < fewest:
            best, fewest = Placed(form(messages), left_out), lost
        if lost == 0:
            break
    return best


def _left_out(messages: Messages, text: str) -> tuple[str, ...]:
    """`text`: of the marked messages."""
    spoken = [(place, message["role"]) for place, message in enumerate(messages) if message["content"]]
    rendered = set(_MARK.findall(text))
    return tuple(role for place, role in spoken if _mark(place) not in rendered)


_MARK = re.compile(r"content-\d+-of-messages")


def _mark(place: int) -> str:
    return f"content-{place}-of-messages"


def _marked(message: dict[str, Any], mark: str) -> dict[str, Any]:
    return {**message, "content": mark} if message["content"] else message


def _unchanged(messages: Messages) -> Messages:
    return messages


def _as_system(messages: Messages) -> Messages:
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def _joined(messages: Messages) -> Messages:
    text, others = _split(messages)
    return [{"role": "system", "content": text}, *others] if text else others


def _in_first_user_message(messages: Messages) -> Messages:
    text, others = _split(messages)
    first = next((place for place, message in enumerate(others) if message["role"] == "user"), None)
    if not text or first is None:
        return [{"role": "user", "content": text}, *others] if text else others
    asked = others[first]
    return [*others[:first], {**asked, "content": f"{text}\n\n{asked['content']}"}, *others[first + 1 :]]


def _split(messages: Messages) -> tuple[str, list[dict[str, Any]]]:
    """The text of all instructions, and the other messages."""
    texts = [message["content"] for message in messages if message["role"] in _INSTRUCTIONS and message["content"]]
    return "\n\n".join(texts), [message for message in messages if message["role"] not in _INSTRUCTIONS]


_FORMS = (_unchanged, _as_system, _joined, _in_first_user_message)


ChatMessage = Mapping[str, Any]
"""`role` and `content`, as OpenAI's API has them; content is text, or a list of text parts."""

_NAMES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
_FALLBACK_STOPS = ("\nUser:", "\nAssistant:", "\nSystem:", "\nTool:")


class Rendering(NamedTuple):
    """A conversation as the model reads it."""

    text: str
    left_out: tuple[str, ...] = ()
    """Roles of the messages whose content the model does not read, one for each message."""


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
        **variables: Any,
    ) -> Rendering:
        """The conversation as the model reads it, up to where its answer begins (`answering`). System and developer
        messages that the template would drop or refuse are placed where it renders them.

        `variables`: what else the template knows, for instance enable_thinking. Raises InputError for messages
        that it refuses, and for content that is no text.
        """
        flat = [_flat(message) for message in messages]
        template = self._compiled.get(self._name(tools=bool(tools)))
        if template is None:
            if tools:
                raise InputError("This model has no chat template, so it knows no tools: leave them out.")
            return Rendering(plain(flat, answering))
        known = {**self._special, "tools": list(tools) if tools else None, "documents": None, **variables}

        def rendered(messages: Messages) -> str:
            return render_template(template, messages=messages, add_generation_prompt=answering, **known)

        placed = place_instructions(flat, rendered)
        return Rendering(rendered(placed.messages), placed.left_out)

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
