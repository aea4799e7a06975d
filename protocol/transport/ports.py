"""Where this machine reaches its own ports, and whether one is in use. Sends nothing."""

import socket
from contextlib import suppress

from protocol.errors import InputError

_ANSWER_SECONDS = 0.5
"""This machine itself answers or refuses at once."""
LOOPBACK = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}  # noqa: S104 - replaced, not bound to
"""Hosts that stand for all addresses of this machine, and where its own programs reach them."""


def require_unused(host: str, port: int, option: str = "") -> None:
    """Raise InputError if a program accepts connections there; port 0 is never in use. `option`: which chooses it.

    macOS lets 127.0.0.1 be bound while another program uses the port at all addresses (SO_REUSEADDR; XNU,
    bsd/netinet/in_pcb.c, in_pcbbind), and the other way round: clients of the one would reach the other.
    """
    if port == 0:
        return
    reached = LOOPBACK.get(host, host)
    with suppress(OSError):
        socket.create_connection((reached, port), _ANSWER_SECONDS).close()
        choose = f"choose another port{option and f' with {option}'}"
        raise InputError(f"Another program already answers at {reached}, port {port}: {choose}, or end it.")
