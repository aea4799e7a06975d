"""What every engine says of its model, and the introduction made of it. Knows no tokens."""

import os
from typing import Protocol

from protocol.messages.base import Role
from protocol.messages.worker import Hello


class LoadedModel(Protocol):
    """`vocabulary` bounds the tokens it knows, `context` the positions."""

    name: str
    model: str
    architecture: str
    vocabulary: int
    context: int
    device: str
    tokenizer: str
    """Fingerprint of what its token ids mean; empty for an engine that works with any."""


def introduction(role: Role, engine: LoadedModel) -> Hello:
    """The Hello of a worker in this process that runs `engine`."""
    return Hello(
        role=role,
        engine=engine.name,
        model=engine.model,
        architecture=engine.architecture,
        vocabulary=engine.vocabulary,
        context=engine.context,
        tokenizer=engine.tokenizer,
        device=engine.device,
        pid=os.getpid(),
    )
