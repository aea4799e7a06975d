"""How the ranks of a sharded target meet before MLX connects them. Knows no model.

MLX's own rendezvous blocks the whole interpreter until the last rank has connected, so the process would notice
neither a signal nor the end of its parent. Here rank 0 listens at its address from the hosts file, the others connect
to it, and MLX gets the port only when all ranks are present. On each connection both sides prove that they have the
key, without sending it, before anything else counts. What follows is not encrypted, and MLX's own connections are not
authenticated: docs/machines/security.md.

A rank sends its greeting with a nonce; rank 0 answers with a nonce of its own and an HMAC over both; the rank sends
another HMAC over both. Each begins with its sender's role, so that neither can be sent back as the other, and fresh
nonces make what was recorded earlier worthless (the form of ISO/IEC 9798-4, three passes).
"""

import hmac
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue
from typing import Literal, NamedTuple, Self

import msgspec

from protocol.contracts.target_hosts import TargetHosts, host_and_port
from protocol.errors import InputError

_LEADER, _FOLLOWER = b"rank 0 proves\n", b"another rank proves\n"


def fresh_nonce() -> str:
    return secrets.token_hex(16)


class Challenge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rank 0's answer to a greeting."""

    nonce: str
    proof: str

    @classmethod
    def fresh(cls, key: bytes, greeting: bytes) -> Self:
        """`greeting`: the bytes that the other rank sent."""
        nonce = fresh_nonce()
        return cls(nonce, _proof(_LEADER, key, greeting, nonce))

    def proves(self, key: bytes, greeting: bytes) -> bool:
        """Whether rank 0 has the key, and answered this greeting."""
        return hmac.compare_digest(self.proof.encode(), _proof(_LEADER, key, greeting, self.nonce).encode())


def answer(key: bytes, greeting: bytes, challenge: Challenge) -> bytes:
    """The other rank's proof."""
    return _proof(_FOLLOWER, key, greeting, challenge.nonce).encode()


def answers(proof: bytes, key: bytes, greeting: bytes, challenge: Challenge) -> bool:
    """Whether the rank that sent `greeting` has the key, and answered this challenge."""
    return hmac.compare_digest(proof, answer(key, greeting, challenge))


def _proof(role: bytes, key: bytes, greeting: bytes, nonce: str) -> str:
    return hmac.new(key, role + nonce.encode() + b"\n" + greeting, "sha256").hexdigest()


_VERSION = 3
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
    nonce: str
    """Fresh for each connection."""


class Peer(NamedTuple):
    """Connections to another rank."""

    rank: int
    commands: socket.socket
    heartbeat: socket.socket


def meet(hosts: TargetHosts, key: bytes, model: str, check: Callable[[], None]) -> list[Peer]:
    """For rank 0: the other ranks, once all are present. `check` is called repeatedly and may raise.

    Connections of strangers are closed, and delay nobody.

    Raises InputError for an address at which rank 0 can't listen, for a rank with another model, and if a rank is
    missing after two minutes.
    """
    deadline = time.monotonic() + _MEETING_SECONDS
    present: dict[tuple[int, str], socket.socket] = {}
    with _listening(hosts.addresses[0][0]) as listener:
        reception = Reception(listener, key)
        while len(present) < 2 * (hosts.ranks - 1):
            check()
            if time.monotonic() > deadline:
                raise _missing(hosts, {rank for rank, _ in present})
            for greeting, connection in reception.greeted():
                _require_fitting(greeting, connection, hosts, model)
                present[greeting.rank, greeting.use] = connection
            present = {key: each for key, each in present.items() if _send(each, _WAIT)}
    for connection in present.values():
        _send(connection, _GO)
    return [Peer(rank, present[rank, "commands"], present[rank, "heartbeat"]) for rank in range(1, hosts.ranks)]


def join(hosts: TargetHosts, key: bytes, rank: int, model: str) -> Peer:
    """For another rank: its connections to rank 0, once all ranks are present. Raises InputError if rank 0 refuses or
    has another key, ConnectionError if rank 0 ends meanwhile, TimeoutError if rank 0 is silent."""
    greeting = Greeting(_VERSION, rank, hosts.ranks, model, "commands", "")
    commands = _connected(hosts, key, greeting)
    # A refusal arrives on the first connection; rank 0 may not listen any more for the second.
    _await(commands, _WAIT, hosts.silence)
    heartbeat = _connected(hosts, key, msgspec.structs.replace(greeting, use="heartbeat"))
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


class Reception:
    """Accepts connections and reads their greetings, each on a thread: one that says nothing holds nobody up."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener = listener
        self._key = key
        self._known: SimpleQueue[tuple[Greeting, socket.socket]] = SimpleQueue()
        self._told: set[str] = set()

    def greeted(self) -> Iterator[tuple[Greeting, socket.socket]]:
        """Connections that have proved to be a rank's since the last call."""
        with suppress(OSError):
            connection, _ = self._listener.accept()
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()
        with suppress(Empty):
            while True:
                yield self._known.get_nowait()

    def _read(self, connection: socket.socket) -> None:
        with suppress(OSError, msgspec.MsgspecError):
            deadline = time.monotonic() + _GREETING_SECONDS
            said = _line(connection, deadline)
            greeting = msgspec.json.decode(said, type=Greeting)
            if self._proves(connection, said, deadline):
                self._known.put((greeting, connection))
                return
            self._tell(connection.getpeername()[0], greeting.rank)
        connection.close()

    def _proves(self, connection: socket.socket, greeting: bytes, deadline: float) -> bool:
        """Whether the other side has the key, which is proved to it first."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = Challenge.fresh(self._key, greeting)
        with suppress(OSError):
            connection.sendall(msgspec.json.encode(challenge) + b"\n")
            return answers(_line(connection, deadline).strip(), self._key, greeting, challenge)
        return False

    def _tell(self, host: str, rank: int) -> None:
        """Once a host, so that no stranger fills the log."""
        if host not in self._told:
            self._told.add(host)
            sys.stderr.write(f"A program at {host} that calls itself rank {rank} did not prove that it has the key.\n")


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


def _connected(hosts: TargetHosts, key: bytes, greeting: Greeting) -> socket.socket:
    """A connection to rank 0, each side of which has proved to have the key. Raises InputError if rank 0 has not."""
    address = hosts.addresses[0][0]
    while True:
        with suppress(OSError), ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection(host_and_port(address), _GREETING_SECONDS))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            said = msgspec.json.encode(msgspec.structs.replace(greeting, nonce=fresh_nonce())) + b"\n"
            connection.sendall(said)
            challenge = _challenge(_line(connection, time.monotonic() + _GREETING_SECONDS))
            if challenge is None or not challenge.proves(key, said):
                raise InputError(
                    f"What answers at {address} does not have the ranks' key: give every host the same hosts file, and "
                    "check that address."
                )
            connection.sendall(answer(key, said, challenge) + b"\n")
            stack.pop_all()
            return connection
        time.sleep(_POLL_SECONDS)


def _challenge(line: bytes) -> Challenge | None:
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(line, type=Challenge)
    return None


def _await(connection: socket.socket, awaited: bytes, silence: float) -> None:
    """Read until this line arrives. Raises InputError with any other line than it and _WAIT."""
    while (line := _line(connection, time.monotonic() + silence)) != awaited:
        if line != _WAIT:
            raise InputError(line.decode(errors="replace").strip())


def _line(connection: socket.socket, deadline: float) -> bytes:
    """One line with its end. Raises ConnectionError if there is none, TimeoutError if it is not there in time."""
    line = bytearray()
    while not line.endswith(b"\n"):
        connection.settimeout(max(_POLL_SECONDS, deadline - time.monotonic()))
        part = connection.recv(1)
        if not part or len(line) > _LONGEST_LINE:
            raise ConnectionError("Rank 0 has ended.")
        if time.monotonic() > deadline:
            raise TimeoutError
        line += part
    return bytes(line)


def _missing(hosts: TargetHosts, present: set[int]) -> InputError:
    absent = [rank for rank in range(1, hosts.ranks) if rank not in present]
    where = ", ".join(f"rank {rank} ({hosts.addresses[rank][0]})" for rank in absent)
    return InputError(
        f"The target's {where} did not come within {_MEETING_SECONDS:.0f} s: run `launch-pipeline target-rank "
        f"--hosts FILE --rank {absent[0] if absent else 1} --target FOLDER` there, with the same files."
    )
