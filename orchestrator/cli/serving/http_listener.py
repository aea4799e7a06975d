"""The socket of `serve`, which `launch` can find while it is open."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.cli.pipelines import print_notes
from orchestrator.http.settings import ServerSettings
from orchestrator.machine.running_servers import announced, http_address
from protocol.paths import servers_folder


@contextmanager
def http_listener(settings: ServerSettings, port: int) -> Iterator[socket.socket]:
    """Raises InputError if the server can't listen there."""
    # The libraries of the server take a while, which other commands need not wait for.
    from orchestrator.http.run import bound

    with bound(settings.hosts[0], port) as listener:
        address = http_address(*listener.getsockname()[:2])
        with announced(servers_folder(), address, settings.key) as note:
            print_notes([note])
            yield listener
