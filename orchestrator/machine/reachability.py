"""Whether a server can be reached, within two seconds: without a network, clients of servers retry for much longer."""

import socket
from contextlib import suppress
from threading import Event, Thread
from urllib.parse import urlsplit

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
