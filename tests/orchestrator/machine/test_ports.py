"""A port that another program uses is noticed before it is bound beside it, as macOS would allow."""

import socket
from collections.abc import Iterator

import pytest
import zmq

from orchestrator.http.run import bound
from orchestrator.machine.network import require_unused
from orchestrator.runtime.hub import Hub
from protocol.errors import InputError
from tests.support.processes import free_ports


@pytest.fixture(params=["127.0.0.1", "0.0.0.0"])
def used(request: pytest.FixtureRequest) -> Iterator[int]:
    """A port at which another program answers."""
    with socket.create_server((request.param, 0)) as other:
        yield other.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_port_in_use_is_refused_with_a_sentence(used: int, host: str):
    with pytest.raises(InputError, match=rf"Another program already answers at .*, port {used}: choose another port"):
        require_unused(host, used)


def test_the_server_and_the_pipeline_notice_it(used: int):
    with pytest.raises(InputError, match="already answers"):
        bound("127.0.0.1", used)
    with zmq.Context() as context, pytest.raises(InputError, match="already answers"):
        Hub(context, f"tcp://127.0.0.1:{used}", str)


def test_a_free_port_and_any_port_are_not_refused():
    for port in (*free_ports(1), 0):
        require_unused("127.0.0.1", port)
