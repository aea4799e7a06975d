"""Creates ZeroMQ sockets with every limit set, at addresses that their keys allow. Knows no messages."""

from typing import Any, TypeVar

import zmq

from protocol.errors import InputError
from protocol.security.addresses import Endpoint, endpoint, require_local
from protocol.security.keys import KeyPair
from protocol.transport.codec import MAX_FRAME

AnySocket = TypeVar("AnySocket", bound=zmq.Socket[Any])

_HIGH_WATER = 10_000
"""Frames queued for a peer before libzmq blocks the sender."""


def configured_dealer(
    context: zmq.Context[AnySocket],
    address: str,
    server: bytes = b"",
    keys: KeyPair | None = None,
    limit: int = MAX_FRAME,
) -> AnySocket:
    """A DEALER with our limits, not yet connected. Raises InputError for an address that needs keys and has none."""
    keyed = bool(server) and keys is not None
    dealer = configured_socket(context.socket(zmq.DEALER), checked_endpoint(address, keyed), limit)
    if server and keys is not None:
        dealer.setsockopt(zmq.CURVE_SERVERKEY, server)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    return dealer


def connected_dealer(context: zmq.Context[AnySocket], address: str) -> AnySocket:
    """A DEALER with our limits, connected to an address on this machine. Raises InputError for any other address."""
    return connect(configured_dealer(context, address), address)


def connect(dealer: AnySocket, address: str) -> AnySocket:
    try:
        dealer.connect(address)
    except zmq.ZMQError as error:
        dealer.close()
        raise InputError(f"Cannot connect to {address} ({error.strerror}): check the address.") from error
    return dealer


def checked_endpoint(address: str, keyed: bool, listening: bool = False) -> Endpoint | None:
    """The TCP endpoint, or None for ipc. Raises InputError for another machine's address without keys."""
    if not keyed:
        require_local(address, listening)
    return endpoint(address, listening)


def configured_socket(socket: AnySocket, where: Endpoint | None, limit: int) -> AnySocket:
    """Set the limits that libzmq leaves open. `where`: a TCP endpoint or None; `limit`: bytes of the largest frame."""
    socket.setsockopt(zmq.MAXMSGSIZE, limit)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    if where is not None:
        # On one machine the system closes the connection of a process that ended. One that was stopped goes on.
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
    socket.setsockopt(zmq.IPV6, where is not None and ":" in where.host)
    return socket
