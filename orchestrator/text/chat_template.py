"""Converts a conversation to the tokens of a prompt: by the model's template, or a plain form without one.

Knows the tokenizer's files, and no model.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

from orchestrator.text.plain_text import with_breaks
from orchestrator.text.repairs import INSTRUCTIONS
from orchestrator.text.template_sources import END, Answer, Question, ask, special_tokens, template_sources
from orchestrator.text.tokenizer import TextCodec
from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError

ChatMessage = Mapping[str, Any]
"""`role` and `content`, as OpenAI's API has them; content is text, or a list of text parts."""

_NAMES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
_FALLBACK_STOPS = ("\nUser:", "\nAssistant:", "\nSystem:", "\nTool:")
_ROLES = ("<|", "<｜")
"""What tokens of roles begin with; some models have them as tokens that are not special."""
_MARKS = re.compile(
    r'think|thought|reason|tool|call_|function|args|python_|inner_|<\|channel>|<channel\|>|<\|"\|>', re.IGNORECASE
)
"""In tokens of thoughts and calls, which the text of an answer can have."""
_CALLS = ("tool_calls", "tool_responses")
"""Parts of an earlier answer in which marks are text too."""
_AT_ONCE = 2
"""Renderings of one template, so that a slow one delays neither the next nor other models."""


class ChatTemplate:
    """Of one model folder. Raises InputError for files that can't be read; a template that is broken or exceeds its
    bounds refuses every conversation."""

    def __init__(self, folder: Path, codec: TextCodec | None = None) -> None:
        self.folder = folder
        self.codec = codec or TextCodec(folder)
        self._settings = settings = ModelFolder(folder).settings("tokenizer_config.json")
        self._sources = template_sources(folder, settings)
        self._special = special_tokens(settings)
        self._variables = {name: _variables(source) for name, source in self._sources.items()}
        self._turns = BoundedSemaphore(_AT_ONCE)

    @property
    def own(self) -> bool:
        """Whether the model brings a template; if not, conversations look like `plain`'s."""
        return bool(self._sources)

    @property
    def faults(self) -> list[str]:
        """Why templates of this model refuse every conversation."""
        return [str(found) for found in self._variables.values() if isinstance(found, InputError)]

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
        return self._known("default")

    def mentions(self, text: str) -> bool:
        """Whether `text` stands in the source of the template, or of that for tools."""
        return any(text in source for source in self._sources.values())

    def search(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The first match in these sources."""
        return next((found for source in self._sources.values() if (found := pattern.search(source))), None)

    @property
    def knows_tools(self) -> bool:
        """Whether the template says anything about `tools`."""
        return "tools" in self._known(self._name(tools=True))

    def plain(self, value: Any, own: bool = False) -> Any:
        """`value`, of JSON's types, whose texts others wrote: control tokens in them stay text (see `plain_text`).

        `own`: an earlier answer, which keeps marks of thoughts and calls. Other control tokens in it were text before:
        decoding hides them."""
        return with_breaks(value, self._controls[own])

    def plain_messages(self, messages: Iterable[ChatMessage]) -> list[dict[str, Any]]:
        """The messages with their texts as `plain` has them."""
        return [
            {
                name: self.plain(value, own=message.get("role") == "assistant" and name not in _CALLS)
                for name, value in message.items()
            }
            for message in messages
        ]

    def text(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None = None, **asked: Any
    ) -> str:
        """The text of `render`."""
        return self.render(messages, tools, **asked).text

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        answering: bool = True,
        continued: bool = False,
        **variables: Any,
    ) -> Answer:
        """The conversation as the model reads it, up to where its answer begins (`answering`), or up to the end of the
        last message, which the answer goes on with (`continued`). What the template refuses, and instructions that it
        would drop, are repaired.

        `variables`: what else the template knows, for instance enable_thinking. Raises InputError for messages
        that it refuses however they are repaired, and for content that is no text.
        """
        flat = [_flat(message) for message in messages]
        name = self._name(tools=bool(tools))
        source, names = self._sources.get(name), self._variables.get(name)
        if source is None:
            begun = f" {flat[-1]['content']}" if continued else ""
            return Answer(plain(flat[:-1] if continued else flat, answering or continued) + begun)
        if isinstance(names, InputError):
            raise InputError(str(names))
        known = {**self._special, "documents": None, **variables}
        with self._turns:
            return ask(Question(source, flat, tools, answering, continued, known))

    def beginning(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> str:
        """What every conversation with these instructions and tools begins with; empty if it can't be told."""
        before = list(takewhile(lambda message: message.get("role") in INSTRUCTIONS, messages))
        try:
            text = self.text([*before, {"role": "user", "content": END}], tools, answering=False, **variables)
        except InputError:
            return ""
        head, there, _ = text.partition(END)
        return head if there else ""

    def tokens(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> list[int]:
        """`text` as token ids, in which messages and tools hold no control tokens (see `plain`). At most BOS is added:
        a model's own template contains its special tokens."""
        return self.codec.encode_rendered(self.text(self.plain_messages(messages), self.plain(tools), **variables))

    @cached_property
    def _controls(self) -> tuple[frozenset[str], frozenset[str]]:
        """Tokens that others' texts, and earlier answers, do not have: special ones, those of roles, marks, and what
        else the template has."""
        controls = self.codec.controls
        roles = frozenset(text for text in controls if controls[text] or text.startswith(_ROLES))
        others = roles.union(text for text in controls if _MARKS.search(text) or self.mentions(text))
        return others, frozenset(text for text in roles if not _MARKS.search(text))

    def _name(self, tools: bool) -> str:
        """Some models have a template of its own for tools."""
        return "tool_use" if tools and "tool_use" in self._sources else "default"

    def _known(self, name: str) -> frozenset[str]:
        """The names that a template reads; none for one that refuses every conversation."""
        found = self._variables.get(name, frozenset())
        return frozenset() if isinstance(found, InputError) else found


def _variables(source: str) -> frozenset[str] | InputError:
    """Or why this template can't be used: the next conversation need not find it out again."""
    try:
        return ask(Question(source)).variables
    except InputError as error:
        return error


def has_template(folder: Path) -> bool:
    """Whether the model in `folder` brings a template. Does not load its tokenizer."""
    return bool(template_sources(folder, ModelFolder(folder).settings("tokenizer_config.json")))


@lru_cache(maxsize=4)
def own_template(folder: str) -> ChatTemplate | None:
    """The chat template of the model in `folder`; None if it has none, or is not on this machine."""
    if not Path(folder).is_dir():
        return None
    template = ChatTemplate(Path(folder))
    return template if template.own else None


def chat_prompt(folder: str, messages: str | Sequence[ChatMessage]) -> list[int]:
    """Token ids of a conversation; a text is its only message.

    Raises InputError if the model has no chat template, or refuses the messages.
    """
    template = own_template(folder)
    if template is None:
        raise InputError(f"The target {folder} has no chat template on this machine: pass the text as it is.")
    conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if not all(isinstance(message, Mapping) for message in conversation):
        raise InputError("A conversation is a list of messages, each with a role and content: give one conversation.")
    return template.tokens(conversation)


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
