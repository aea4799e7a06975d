"""Where this machine reaches its own ports, and other machines may reach it. Sends nothing."""

import socket
from contextlib import suppress
from threading import Event, Thread
from urllib.parse import urlsplit

from protocol.errors import InputError
from protocol.security.addresses import Endpoint

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


_SECONDS = 2.0
_ADDRESS_SECONDS = 1.0
"""So that an address of a network that is only half there leaves time for the next one."""
_PORTS = {"http": 80, "socks": 1080, "socks5": 1080, "socks5h": 1080}
_HTTPS_PORT = 443


def reachable(url: str) -> bool:
    """Whether the server of `url`, or the user's proxy for it, accepts a TCP connection. Sends nothing."""
    connected = Event()

    def connect() -> None:
        with suppress(OSError), socket.create_connection(_first_stop(url), _ADDRESS_SECONDS):
            connected.set()

    # Looking up a name has no time limit, so the thread may stay behind.
    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return connected.is_set()


def _first_stop(url: str) -> tuple[str, int]:
    """Host and port."""
    # It imports much, which starts that fetch nothing need not wait for.
    from urllib.request import getproxies, proxy_bypass

    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return parts.hostname or "", parts.port or _PORTS.get(parts.scheme, _HTTPS_PORT)
