"""Where the ranks of a sharded target find one another before MLX connects them. Knows no model.

MLX's own meeting blocks the whole interpreter until the last rank is there, so that no death pipe and no signal
would be heard. Here rank 0 listens at its address from the hosts file, the others dial it, and only when all are
there the port is left to MLX. Nothing is authenticated, neither here nor by MLX: only for a wire that is trusted.
"""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NamedTuple

import msgspec

from protocol.contracts.target_hosts import TargetHosts, host_and_port
from protocol.errors import InputError

_VERSION = 1
_PATIENCE = 120.0
"""Seconds that rank 0 waits for the others."""
_GREETING_SECONDS = 2.0
"""A connection that says nothing for so long is nobody of ours."""
_LOOK_SECONDS = 0.1
_LONGEST_LINE = 4096
_WAIT, _GO = b"wait\n", b"go\n"


class Greeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line that a rank says on each of its two connections."""

    version: int
    rank: int
    ranks: int
    model: str
    """Fingerprint of the weights."""
    use: Literal["calls", "pulse"]


class Peer(NamedTuple):
    """Another rank: what it is told to do goes through `calls`, signs of life through `pulse`."""

    rank: int
    calls: socket.socket
    pulse: socket.socket


def meet(hosts: TargetHosts, model: str, check: Callable[[], None]) -> list[Peer]:
    """Rank 0: the others, once all are there. `check` is called again and again and may raise.

    Raises InputError for an address that can't be listened at, for a rank with another model, and after two
    minutes without all ranks.
    """
    deadline = time.monotonic() + _PATIENCE
    present: dict[tuple[int, str], socket.socket] = {}
    with _listening(hosts.addresses[0][0]) as listener:
        while len(present) < 2 * (hosts.ranks - 1):
            check()
            if time.monotonic() > deadline:
                raise _missing(hosts, {rank for rank, _ in present})
            arrival = _arrival(listener)
            if arrival is not None:
                greeting, connection = arrival
                _require_fitting(greeting, connection, hosts, model)
                present[greeting.rank, greeting.use] = connection
            present = {key: each for key, each in present.items() if _told(each, _WAIT)}
    for connection in present.values():
        _told(connection, _GO)
    return [Peer(rank, present[rank, "calls"], present[rank, "pulse"]) for rank in range(1, hosts.ranks)]


def join(hosts: TargetHosts, rank: int, model: str) -> Peer:
    """Another rank: its connections to rank 0, once all are there. Raises InputError if rank 0 refuses,
    ConnectionError if it goes away meanwhile, TimeoutError if it falls silent."""
    greeting = Greeting(_VERSION, rank, hosts.ranks, model, "calls")
    calls = _dialled(hosts, greeting)
    # A refusal comes on the first connection: nobody may listen any more for the second.
    _await(calls, _WAIT, hosts.silence)
    pulse = _dialled(hosts, msgspec.structs.replace(greeting, use="pulse"))
    for connection in (calls, pulse):
        _await(connection, _GO, hosts.silence)
        connection.settimeout(None)
    return Peer(0, calls, pulse)


def _listening(address: str) -> socket.socket:
    try:
        listener = socket.create_server(host_and_port(address))
    except OSError as error:
        raise InputError(
            f"Rank 0 can't listen at {address} ({error.strerror}): end what uses that port, "
            "or give this machine's own address first in the hosts file."
        ) from error
    listener.settimeout(_LOOK_SECONDS)
    return listener


def _arrival(listener: socket.socket) -> tuple[Greeting, socket.socket] | None:
    """Who has dialled, if anybody of ours."""
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
    """Both sides are told if a rank does not belong here: the user sees one of them."""
    refusal = ""
    if greeting.version != _VERSION or greeting.ranks != hosts.ranks or not 0 < greeting.rank < hosts.ranks:
        refusal = "has another hosts file or version than rank 0: give all ranks the same."
    elif greeting.model != model:
        refusal = "has another target model than rank 0: copy the same folder to every host."
    if refusal:
        text = f"Rank {greeting.rank} {refusal}"
        _told(connection, f"{text}\n".encode())
        connection.close()
        raise InputError(text)


def _told(connection: socket.socket, line: bytes) -> bool:
    """Say it; whether the other side is still there."""
    try:
        connection.sendall(line)
    except OSError:
        connection.close()
        return False
    connection.settimeout(None)
    return True


def _dialled(hosts: TargetHosts, greeting: Greeting) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection(host_and_port(hosts.addresses[0][0]), _GREETING_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(msgspec.json.encode(greeting) + b"\n")
            return connection
        except OSError:
            time.sleep(_LOOK_SECONDS)


def _await(connection: socket.socket, awaited: bytes, silence: float) -> None:
    """Read up to this line. Raises InputError for what is neither it nor a word to wait."""
    connection.settimeout(silence)
    while (line := _line(connection)) != awaited:
        if line != _WAIT:
            raise InputError(line.decode(errors="replace").strip())


def _line(connection: socket.socket) -> bytes:
    """One line with its end. Raises ConnectionError when there is none."""
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
        f"The target's {where} did not come within {_PATIENCE:.0f} s: run `launch-pipeline target-rank "
        f"--hosts FILE --rank {absent[0] if absent else 1} --target FOLDER` there, with the same files."
    )
