"""Servers of which this machine knows: those that admitted it, and the HTTP servers that this user runs on it.

Addresses and keys, in files of mode 0600. A running server's file is there while it runs; that of a killed one stays
until the next look.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from orchestrator.machine.network import LOOPBACK
from protocol.errors import InputError
from protocol.processes import start_time
from protocol.security.addresses import Endpoint, endpoint, tcp_address
from protocol.security.keys import is_key
from protocol.security.private_files import private_folder, read_private, write_private

_FILE = "servers.json"


class KnownServer(NamedTuple):
    """The address at which a pipeline listens, and its public key."""

    where: Endpoint
    public: bytes

    @property
    def address(self) -> str:
        return tcp_address(*self.where)


def known_server(folder: Path, text: str) -> KnownServer:
    """The server at HOST:PORT. Raises InputError if this machine has not joined it."""
    where = host_port(text)
    for server in known_servers(folder):
        if server.where == where:
            return server
    known = ", ".join(_text(server.where) for server in known_servers(folder)) or "none"
    raise InputError(
        f"This machine has not joined a pipeline at {text} (joined: {known}): ask its owner for a join line "
        "(`launch-pipeline workers invite` there) and give that instead."
    )


def known_servers(folder: Path) -> list[KnownServer]:
    """All, in no order. Raises InputError if others could have written the file."""
    file = private_folder(folder) / _FILE
    try:
        kept = msgspec.json.decode(read_private(file) or b"{}", type=dict[str, str])
    except msgspec.DecodeError as error:
        raise InputError(f"{file} is damaged ({error}): remove it, and join again with a new join line.") from error
    return [KnownServer(host_port(text), key.encode()) for text, key in kept.items() if is_key(key.encode())]


def remember(folder: Path, server: KnownServer) -> None:
    """Save the server, so that HOST:PORT alone is enough from now on. Replaces an earlier key of that address."""
    kept = {_text(known.where): known.public.decode() for known in known_servers(folder)}
    if kept.get(_text(server.where)) != server.public.decode():
        kept[_text(server.where)] = server.public.decode()
        write_private(folder / _FILE, msgspec.json.encode(kept))


def host_port(text: str, listening: bool = False) -> Endpoint:
    """HOST:PORT, IPv6 hosts in brackets. Raises InputError for anything else."""
    found = endpoint(f"tcp://{text}", listening)
    assert found is not None
    return found


def _text(where: Endpoint) -> str:
    return tcp_address(*where).removeprefix("tcp://")


# Running ones --------------------------------------------------------------------------------------


class RunningServer(msgspec.Struct, frozen=True):
    address: str
    """http://HOST:PORT, without a path."""
    key: str | None
    process: int
    started: str
    """`start_time` of the process, since another one may get its number."""


def http_address(host: str, port: int) -> str:
    """Where programs of this machine reach a server that listens at `host`."""
    host = LOOPBACK.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@contextmanager
def announced(folder: Path, address: str, key: str | None) -> Iterator[str]:
    """The context of a server in this process. Yields a sentence if its file can't be written, else ""."""
    process = os.getpid()
    file, note = folder / f"{process}.json", ""
    with suppress(InputError):
        # Keys of servers that were killed.
        running_servers(folder)
    try:
        server = RunningServer(address, key, process, start_time(process) or "")
        write_private(private_folder(folder) / file.name, msgspec.json.encode(server))
    except OSError as error:
        note = f"`launch` will not find this server: {file} can't be written ({error.strerror})."
    except InputError as error:
        note = f"`launch` will not find this server: {error}"
    try:
        yield note
    finally:
        if not note:
            file.unlink(missing_ok=True)


def running_servers(folder: Path) -> list[RunningServer]:
    """Those whose process runs, the latest first. Raises InputError if others could have written their files."""
    if not folder.is_dir():
        return []
    found: list[RunningServer] = []
    for file in private_folder(folder).glob("*.json"):
        content = read_private(file)
        if content is None:
            continue
        try:
            server = msgspec.json.decode(content, type=RunningServer)
        except msgspec.DecodeError as error:
            raise InputError(f"{file} is damaged ({error}): remove it.") from error
        if start_time(server.process) == server.started:
            found.append(server)
        else:
            file.unlink(missing_ok=True)
    return sorted(found, key=lambda server: int(server.started or 0), reverse=True)
