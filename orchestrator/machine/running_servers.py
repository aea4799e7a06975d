"""The HTTP servers that this user runs on this machine: address and key of each, in a file of mode 0600.

A server's file is there while it runs. The file of a killed one stays until the next look.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from orchestrator.machine.network import LOOPBACK
from protocol.errors import InputError
from protocol.processes import start_time
from protocol.security.private_files import private_folder, read_private, write_private


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
