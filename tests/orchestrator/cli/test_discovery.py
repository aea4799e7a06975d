"""Servers are found by the keys that are known, on the loopback interface's multicast."""

import pytest

from orchestrator.cli.remote_workers import announced, discover
from orchestrator.machine.servers import KnownServer
from protocol.errors import InputError
from protocol.security.addresses import Endpoint

pytest.importorskip("zeroconf", reason="an optional package")
SERVER = KnownServer(Endpoint("127.0.0.1", 5571), b"a" * 40)
HERE = ("127.0.0.1",)


@pytest.mark.thorough
def test_a_server_is_found_by_its_key():
    with announced("studio", SERVER, HERE):
        assert discover([b"b" * 40, SERVER.public], 20.0, HERE) == SERVER


@pytest.mark.thorough
def test_a_server_whose_key_is_not_known_is_not_found():
    with announced("studio", SERVER, HERE), pytest.raises(InputError, match=r"without --discover\.$"):
        discover([b"b" * 40], 1.0, HERE)
