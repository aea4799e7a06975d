"""The address by which other machines may reach this one. Sends nothing."""

import socket
from contextlib import suppress

from protocol.security.addresses import Endpoint
from protocol.transport.ports import LOOPBACK

_FAR_AWAY = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses for documentation (RFC 5737, RFC 3849): no machine has them, so the default route leads there."""


def reachable_host(bound: Endpoint) -> str:
    """The host for join lines: the bound one, unless it stands for all addresses of this machine."""
    if bound.host not in LOOPBACK:
        return bound.host
    return own_host() or socket.gethostname()


def own_host() -> str | None:
    """This machine's address on its way to other networks; None without such a way."""
    for family, far in _FAR_AWAY.items():
        # Connecting a datagram socket only chooses a route.
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            return str(probe.getsockname()[0])
    return None
