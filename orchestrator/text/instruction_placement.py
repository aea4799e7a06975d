"""Places a conversation's instructions where a chat template renders them. Pure.

Instructions are messages of the roles system and developer. Templates drop or refuse some of them without a rule that
could be read from their source, so a copy of the conversation with a marker for each content is rendered first.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
