"""Valid socket addresses: ipc paths that the system does not truncate, and TCP with host and port."""

import os
import re
from ipaddress import IPv6Address
from typing import NamedTuple

from protocol.errors import InputError
from protocol.paths import MAX_SOCKET_PATH

_MAX_PORT = 65535
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\.?")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.-]+)?")
_TCP = re.compile(r"tcp://(?:\[(?P<bracketed>[^\]]*)\]|(?P<plain>[^:\[\]]*)):(?P<port>[0-9]{1,5})")


class Endpoint(NamedTuple):
    """A TCP address; an IPv6 host is without brackets."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host in _LOOPBACK


def tcp_address(host: str, port: int, listening: bool = False) -> str:
    """The address in ZeroMQ's form. Raises InputError. Port 0 means any free port and is for listening only."""
    if not ((_NAME.fullmatch(host) or _is_ipv6(host)) and len(host) <= 253):
        raise InputError(f"{host[:300]!r} is not a host: give a name, an IPv4 or an IPv6 address.")
    address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    _require_port(address, port, listening)
    return address


def endpoint(address: str, listening: bool = False) -> Endpoint | None:
    """Host and port of a TCP address; None for a valid ipc address. Raises InputError for anything else."""
    if address.startswith("ipc:///"):
        _require_path(address)
        return None
    parts = _TCP.fullmatch(address)
    host = None if parts is None else parts["bracketed"] or parts["plain"]
    if parts is None or not host or not (_NAME.fullmatch(host) or (parts["bracketed"] and _is_ipv6(host))):
        raise InputError(f"{address} is not an address: use ipc:///path or tcp://HOST:PORT.")
    _require_port(address, int(parts["port"]), listening)
    return Endpoint(host, int(parts["port"]))


def _is_ipv6(host: str) -> bool:
    try:
        IPv6Address(host)
    except ValueError:
        return False
    return _IPV6.fullmatch(host) is not None


def require_local(address: str, listening: bool = False) -> None:
    """Raise InputError for an invalid address, or one that another machine can reach, which needs keys."""
    found = endpoint(address, listening)
    if found is not None and not found.loopback:
        raise InputError(
            f"{address} is not on this machine only, so it needs keys: use ipc:///path or tcp://127.0.0.1:PORT; "
            "for workers of other machines use `launch-pipeline serve-workers --listen HOST:PORT`."
        )


def _require_port(address: str, port: int, listening: bool) -> None:
    if not (0 if listening else 1) <= port <= _MAX_PORT:
        raise InputError(f"{address} has an invalid port: choose one from 1024 to {_MAX_PORT}.")


def _require_path(address: str) -> None:
    if not 1 <= len(os.fsencode(address.removeprefix("ipc:///"))) < MAX_SOCKET_PATH:
        raise InputError(
            f"The socket path of {address} must have 1 to {MAX_SOCKET_PATH} bytes: "
            "choose another file, in a folder with a shorter name."
        )
