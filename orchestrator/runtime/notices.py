"""What an orchestrator and its parent say through the socket that they share: sentences for the user, as lines of
JSON, and at the end how long the pipeline outlives its parent.

The parent may not read them: what does not fit into the socket's buffer is dropped.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal, TypeAlias

import msgspec

NoticeKind: TypeAlias = Literal["progress", "told", "warning"]


class Notice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """progress: replaces the progress before it; warning: something failed, and the pipeline goes on without it."""

    text: str
    kind: NoticeKind = "told"


class NoticeSender:
    """The orchestrator's end."""

    def __init__(self, life: int | None) -> None:
        """`life`: the socket shared with the parent, which stays open; None if there is none."""
        self._socket = None if life is None else socket.socket(fileno=os.dup(life))

    def send(self, notice: Notice) -> None:
        with suppress(OSError):
            if self._socket is not None:
                self._socket.send(msgspec.json.encode(notice) + b"\n", socket.MSG_DONTWAIT)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def stay(life: socket.socket, seconds: float) -> None:
    """The parent's end, before it leaves: the pipeline stays until nobody has asked it anything for so long."""
    life.sendall(msgspec.json.encode(seconds))


def time_to_stay(life: int) -> float | None:
    """The orchestrator's end, when it can be read: what the parent asked for; None if the parent just ended."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(os.read(life, 64), type=float)
    return None


def received(life: socket.socket) -> Iterator[Notice]:
    """The parent's end: the notices until the orchestrator ends, or until this end is shut down."""
    with suppress(OSError), life.makefile("rb") as lines:
        for line in lines:
            # A line that did not fit whole is no notice.
            with suppress(msgspec.DecodeError):
                yield msgspec.json.decode(line, type=Notice)
