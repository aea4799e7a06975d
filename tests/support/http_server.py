"""The HTTP server at a port of this machine, with a scripted pipeline, and clients that are bare sockets."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from orchestrator.http.app import server_of_one
from orchestrator.http.run import bound, http_server
from orchestrator.http.settings import ConnectionLimits, ServerSettings
from tests.support.asked_server import CODEC, KEY, TEMPLATE
from tests.support.fake_pipeline import FakePipeline
from tests.support.processes import until

_SECONDS = 20.0


@dataclass(frozen=True)
class ListeningServer:
    server: uvicorn.Server
    address: tuple[str, int]

    @property
    def connections(self) -> int:
        return len(self.server.server_state.connections)

    @contextlib.contextmanager
    def client(self, sent: bytes = b"", receive_buffer: int | None = None) -> Iterator[socket.socket]:
        """A connection that has sent `sent`."""
        with socket.socket() as client:
            client.settimeout(_SECONDS)
            if receive_buffer is not None:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            client.connect(self.address)
            client.sendall(sent)
            yield client


@contextlib.contextmanager
def listening(
    pipeline: FakePipeline | None = None, *, limits: ConnectionLimits | None = None, **settings: Any
) -> Iterator[ListeningServer]:
    given = ServerSettings(**{"names": ("demo",), "key": KEY, "connections": limits or ConnectionLimits(), **settings})
    with running(http_server(server_of_one(pipeline or FakePipeline(), CODEC, TEMPLATE, given))) as server:
        yield server


@contextlib.contextmanager
def running(server: uvicorn.Server) -> Iterator[ListeningServer]:
    with bound("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            until(lambda: server.started, _SECONDS)
            yield ListeningServer(server, listener.getsockname())
        finally:
            server.should_exit = True
            thread.join()


def request(method: str, path: str, *headers: str, body: bytes = b"", key: str | None = KEY) -> bytes:
    """A request with these header lines, and with the length of its body if it has one."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", *headers]
    if key is not None:
        lines.append(f"authorization: Bearer {key}")
    if body:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def status(client: socket.socket) -> int:
    """The status of the next answer, whose head is read."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += (byte := client.recv(1))
        assert byte, f"closed after {head!r}"
    return int(head.split()[1])


def closed(client: socket.socket) -> bool:
    """Reads until the server closes the connection. Raises TimeoutError if it does not."""
    with contextlib.suppress(ConnectionResetError):
        while client.recv(1 << 16):
            pass
    return True
