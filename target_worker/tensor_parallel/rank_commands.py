"""Commands of rank 0 to the other ranks, and their bytes. Knows no model and opens no sockets.

A command is named after the method of `TreeSequence` or `LanguageModel` that every rank runs with the same arguments.
"""

import socket
from typing import TypeAlias

import msgspec

from protocol.errors import WireError

_LENGTH_BYTES = 4
_MOST_BYTES = 16 << 20


class PrefillCommand(msgspec.Struct, frozen=True, tag="prefill", array_like=True):
    sequence: int
    tokens: tuple[int, ...]


class EvaluateCommand(msgspec.Struct, frozen=True, tag="evaluate", array_like=True):
    sequence: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]


class EvaluateTogetherCommand(msgspec.Struct, frozen=True, tag="evaluate_together", array_like=True):
    """All parts in one forward."""

    parts: tuple[EvaluateCommand, ...]


class KeepCommand(msgspec.Struct, frozen=True, tag="keep", array_like=True):
    """Commit the rows of `path`; all others are forgotten."""

    sequence: int
    path: tuple[int, ...]


class TruncateCommand(msgspec.Struct, frozen=True, tag="truncate", array_like=True):
    sequence: int
    length: int


class RecordCommand(msgspec.Struct, frozen=True, tag="record", array_like=True):
    """Record these outputs from now on."""

    outputs: tuple[int, ...]


class CloseCommand(msgspec.Struct, frozen=True, tag="close", array_like=True):
    """The sequence is not needed any more."""

    sequence: int


RankCommand: TypeAlias = (
    PrefillCommand
    | EvaluateCommand
    | EvaluateTogetherCommand
    | KeepCommand
    | TruncateCommand
    | RecordCommand
    | CloseCommand
)
_DECODER = msgspec.msgpack.Decoder(RankCommand)


def encoded(command: RankCommand) -> bytes:
    body = msgspec.msgpack.encode(command)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def received(connection: socket.socket) -> RankCommand:
    """The next command. Raises EOFError if the other end is closed, WireError for bytes that are no command."""
    length = int.from_bytes(_exactly(connection, _LENGTH_BYTES), "big")
    if length > _MOST_BYTES:
        raise WireError(f"Rank 0 announced a command of {length:,} bytes; at most {_MOST_BYTES:,} are allowed.")
    try:
        return _DECODER.decode(_exactly(connection, length))
    except msgspec.MsgspecError as error:
        raise WireError(f"Rank 0 sent bytes that are no command ({error}).") from error


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
