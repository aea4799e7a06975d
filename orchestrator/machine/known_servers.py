"""The servers that admitted this machine: their addresses and public keys, in a file of mode 0600."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from protocol.errors import InputError
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
