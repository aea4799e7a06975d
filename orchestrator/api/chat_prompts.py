"""A question or a conversation to the tokens that an instruct model answers. Knows no sockets."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from orchestrator.text.chat_template import ChatMessage, ChatTemplate
from protocol.errors import InputError


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
