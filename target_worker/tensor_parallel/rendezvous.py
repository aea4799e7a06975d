"""How the ranks of a sharded target meet before MLX connects them. Knows no model.

MLX's own rendezvous blocks the whole interpreter until the last rank has connected, so the process would notice
neither a signal nor the end of its parent. Here rank 0 listens at its address from the hosts file, the others connect
to it, and MLX gets the port only when all ranks are present. Neither this nor MLX authenticates anything: for trusted
networks only.
"""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NamedTuple

import msgspec

from protocol.contracts.target_hosts import TargetHosts, host_and_port
from protocol.errors import InputError

_VERSION = 2
_MEETING_SECONDS = 120.0
"""Seconds that rank 0 waits for the others."""
_GREETING_SECONDS = 2.0
"""A connection without a greeting for so long is not a rank's."""
_POLL_SECONDS = 0.1
_LONGEST_LINE = 4096
_WAIT, _GO = b"wait\n", b"go\n"


class Greeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line that a rank sends on each of its two connections."""

    version: int
    rank: int
    ranks: int
    model: str
    """Fingerprint of the weights, and of what holds their keys and values."""
    use: Literal["commands", "heartbeat"]


class Peer(NamedTuple):
    """Connections to another rank."""

    rank: int
    commands: socket.socket
    heartbeat: socket.socket


def meet(hosts: TargetHosts, model: str, check: Callable[[], None]) -> list[Peer]:
    """For rank 0: the other ranks, once all are present. `check` is called repeatedly and may raise.

    Raises InputError for an address at which rank 0 can't listen, for a rank with another model, and if a rank is
    missing after two minutes.
    """
    deadline = time.monotonic() + _MEETING_SECONDS
    present: dict[tuple[int, str], socket.socket] = {}
    with _listening(hosts.addresses[0][0]) as listener:
        while len(present) < 2 * (hosts.ranks - 1):
            check()
            if time.monotonic() > deadline:
                raise _missing(hosts, {rank for rank, _ in present})
            accepted = _accepted(listener)
            if accepted is not None:
                greeting, connection = accepted
                _require_fitting(greeting, connection, hosts, model)
                present[greeting.rank, greeting.use] = connection
            present = {key: each for key, each in present.items() if _send(each, _WAIT)}
    for connection in present.values():
        _send(connection, _GO)
    return [Peer(rank, present[rank, "commands"], present[rank, "heartbeat"]) for rank in range(1, hosts.ranks)]


def join(hosts: TargetHosts, rank: int, model: str) -> Peer:
    """For another rank: its connections to rank 0, once all ranks are present. Raises InputError if rank 0 refuses,
    ConnectionError if rank 0 ends meanwhile, TimeoutError if rank 0 is silent."""
    greeting = Greeting(_VERSION, rank, hosts.ranks, model, "commands")
    commands = _connected(hosts, greeting)
    # A refusal arrives on the first connection; rank 0 may not listen any more for the second.
    _await(commands, _WAIT, hosts.silence)
    heartbeat = _connected(hosts, msgspec.structs.replace(greeting, use="heartbeat"))
    for connection in (commands, heartbeat):
        _await(connection, _GO, hosts.silence)
        connection.settimeout(None)
    return Peer(0, commands, heartbeat)


def _listening(address: str) -> socket.socket:
    try:
        listener = socket.create_server(host_and_port(address))
    except OSError as error:
        raise InputError(
            f"Rank 0 can't listen at {address} ({error.strerror}): end what uses that port, "
            "or give this machine's own address first in the hosts file."
        ) from error
    listener.settimeout(_POLL_SECONDS)
    return listener


def _accepted(listener: socket.socket) -> tuple[Greeting, socket.socket] | None:
    """The next connection with a rank's greeting, if there is one."""
    with suppress(OSError):
        connection, _ = listener.accept()
        connection.settimeout(_GREETING_SECONDS)
        with suppress(OSError, msgspec.MsgspecError):
            greeting = msgspec.json.decode(_line(connection), type=Greeting)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return greeting, connection
        connection.close()
    return None


def _require_fitting(greeting: Greeting, connection: socket.socket, hosts: TargetHosts, model: str) -> None:
    """Refuse a rank that does not belong here. Both sides get the reason, since the user sees one of them."""
    refusal = ""
    if greeting.version != _VERSION or greeting.ranks != hosts.ranks or not 0 < greeting.rank < hosts.ranks:
        refusal = "has another hosts file or version than rank 0: give all ranks the same."
    elif greeting.model != model:
        refusal = "has another target model or other --kv-bits than rank 0: give every host the same of both."
    if refusal:
        text = f"Rank {greeting.rank} {refusal}"
        _send(connection, f"{text}\n".encode())
        connection.close()
        raise InputError(text)


def _send(connection: socket.socket, line: bytes) -> bool:
    """Send a line. Returns whether the other side is still connected."""
    try:
        connection.sendall(line)
    except OSError:
        connection.close()
        return False
    connection.settimeout(None)
    return True


def _connected(hosts: TargetHosts, greeting: Greeting) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection(host_and_port(hosts.addresses[0][0]), _GREETING_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(msgspec.json.encode(greeting) + b"\n")
            return connection
        except OSError:
            time.sleep(_POLL_SECONDS)


def _await(connection: socket.socket, awaited: bytes, silence: float) -> None:
    """Read until this line arrives. Raises InputError with any other line than it and _WAIT."""
    connection.settimeout(silence)
    while (line := _line(connection)) != awaited:
        if line != _WAIT:
            raise InputError(line.decode(errors="replace").strip())


def _line(connection: socket.socket) -> bytes:
    """One line with its end. Raises ConnectionError if there is none."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = connection.recv(1)
        if not part or len(line) > _LONGEST_LINE:
            raise ConnectionError("Rank 0 has ended.")
        line += part
    return bytes(line)


def _missing(hosts: TargetHosts, present: set[int]) -> InputError:
    absent = [rank for rank in range(1, hosts.ranks) if rank not in present]
    where = ", ".join(f"rank {rank} ({hosts.addresses[rank][0]})" for rank in absent)
    return InputError(
        f"The target's {where} did not come within {_MEETING_SECONDS:.0f} s: run `launch-pipeline target-rank "
        f"--hosts FILE --rank {absent[0] if absent else 1} --target FOLDER` there, with the same files."
    )
