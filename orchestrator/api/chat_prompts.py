"""A single question to the tokens that an instruct model answers. Knows no sockets."""

from functools import lru_cache
from pathlib import Path

from orchestrator.text.chat_template import ChatTemplate
from protocol.errors import InputError


@lru_cache(maxsize=4)
def own_template(folder: str) -> ChatTemplate | None:
    """The chat template of the model in `folder`; None if it has none, or is not on this machine."""
    if not Path(folder).is_dir():
        return None
    template = ChatTemplate(Path(folder))
    return template if template.own else None


def chat_prompt(folder: str, text: str) -> list[int]:
    """Token ids of a conversation whose only message is `text`. Raises InputError if the model has no chat template."""
    template = own_template(folder)
    if template is None:
        raise InputError(f"The target {folder} has no chat template on this machine: pass the text as it is.")
    return template.tokens([{"role": "user", "content": text}])
