"""What a modelled worker does when it is told something: replies, and how long they take. Pure."""

from typing import NamedTuple, Protocol

from orchestrator.tools.simulate.language import VOCABULARY
from protocol.messages.base import Role
from protocol.messages.worker import FromWorker, Hello, ToWorker

CHUNK = 512
"""Prompt tokens of one prefill forward; messages are read in between."""


class Work(NamedTuple):
    """The worker is busy for `seconds`, then its replies leave."""

    replies: tuple[FromWorker, ...] = ()
    seconds: float = 0.0


class ModelledWorker(Protocol):
    """Messages in, work out; knows no time of day."""

    hello: Hello

    def handle(self, message: ToWorker) -> Work: ...

    def work(self) -> Work | None:
        """One unit of what it does unasked; None if there is nothing to do."""
        ...


def modelled_hello(role: Role, context: int) -> Hello:
    return Hello(
        role=role,
        engine="modelled",
        model=f"modelled-{role}",
        architecture="none",
        vocabulary=VOCABULARY,
        context=context,
        tokenizer="",
        device="none",
        pid=1,
    )
