"""Laws of asking whether a server can be reached: the user's proxy is asked in its place, and the answer comes soon."""

import socket
import threading
from collections.abc import Iterator

import pytest

from orchestrator.machine import network
from orchestrator.machine.network import reachable

NOWHERE = "http://host.invalid"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of a server on this machine. The user has no proxy."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_server_that_accepts_connections_is_reachable(port: int):
    assert reachable(f"https://127.0.0.1:{port}/path")


def test_a_server_that_refuses_and_one_without_an_address_are_not(port: int):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert not reachable(f"https://127.0.0.1:{unused.getsockname()[1]}")
    assert not reachable(NOWHERE)


@pytest.mark.parametrize("variable", ["http_proxy", "all_proxy"])
@pytest.mark.parametrize("scheme", ["http://", ""])
def test_behind_a_proxy_the_proxy_is_asked(monkeypatch: pytest.MonkeyPatch, port: int, variable: str, scheme: str):
    monkeypatch.setenv(variable, f"{scheme}127.0.0.1:{port}")
    assert reachable(NOWHERE)

    monkeypatch.setenv("no_proxy", "host.invalid")
    assert not reachable(NOWHERE)


def test_a_network_that_swallows_everything_is_given_up_soon(monkeypatch: pytest.MonkeyPatch):
    over = threading.Event()

    def swallowed(*_: object) -> None:
        over.wait()
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", swallowed)
    monkeypatch.setattr(network, "_SECONDS", 0.1)

    assert not reachable(NOWHERE)
    over.set()
