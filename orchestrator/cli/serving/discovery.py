"""Finds pipelines on the local network by DNS-SD over multicast DNS (RFC 6762, 6763), with the optional zeroconf.

A result is an address and a public key to compare. It is not trusted: CURVE proves the key.
"""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from orchestrator.machine.servers import KnownServer
from protocol.errors import InputError
from protocol.security.addresses import Endpoint

_TYPE = "_lp-workers._tcp.local."
_KEY = b"key"


@contextmanager
def announced(name: str, server: KnownServer, interfaces: Sequence[str] = ()) -> Iterator[None]:
    """Announce this server on the local network under `name`; `interfaces`: addresses, none for all."""
    zeroconf = _zeroconf()
    addresses = [_packed(server.where.host)]
    described = zeroconf.ServiceInfo(
        _TYPE,
        f"{name}.{_TYPE}",
        addresses=addresses,
        port=server.where.port,
        properties={_KEY: server.public},
    )
    zeroconf_instance = _zeroconf_instance(zeroconf, interfaces)
    try:
        zeroconf_instance.register_service(described, allow_name_change=True)
        yield
    finally:
        zeroconf_instance.close()


def discover(
    wanted: Sequence[bytes], seconds: float, interfaces: Sequence[str] = (), clock: Callable[[], float] = time.monotonic
) -> KnownServer:
    """The first announced server with one of these public keys. Raises InputError if there is none in time."""
    zeroconf = _zeroconf()
    found: list[KnownServer] = []

    def heard(zeroconf: Any, service_type: str, name: str, **_: Any) -> None:
        described = zeroconf.get_service_info(service_type, name, timeout=2000)
        key = b"" if described is None else described.properties.get(_KEY) or b""
        if described is not None and key in wanted:
            found.extend(
                KnownServer(Endpoint(address, described.port), key) for address in described.parsed_addresses()[:1]
            )

    zeroconf_instance = _zeroconf_instance(zeroconf, interfaces)
    browser = zeroconf.ServiceBrowser(zeroconf_instance, _TYPE, handlers=[heard])
    try:
        deadline = clock() + seconds
        while not found and clock() < deadline:
            time.sleep(0.05)
    finally:
        browser.cancel()
        zeroconf_instance.close()
    if not found:
        raise InputError(
            f"No pipeline that this machine may join was announced within {seconds:.0f} s (`--announce NAME` there; on "
            "macOS allow access to the local network): give a join line or HOST:PORT without --discover."
        )
    return found[0]


def _zeroconf_instance(zeroconf: Any, interfaces: Sequence[str]) -> Any:
    return zeroconf.Zeroconf(interfaces=list(interfaces)) if interfaces else zeroconf.Zeroconf()


def _packed(host: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)


def _zeroconf() -> Any:
    try:
        import zeroconf
    except ImportError as error:
        raise InputError(
            "Discovery needs the optional package zeroconf: install it (`pip install 'launch-pipeline[discover]'`), or "
            "give HOST:PORT."
        ) from error
    return zeroconf
