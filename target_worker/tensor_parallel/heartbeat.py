"""Signs of life between two ranks. Knows no model.

A collective with a peer that was stopped, or whose cable was pulled, blocks for ever. So a thread on each side,
which no collective blocks, sends a byte a second and listens for the other's.
"""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_BEAT_SECONDS = 1.0


def start_heartbeat(connection: socket.socket, silence: float, lost: Callable[[str], object]) -> None:
    """Beat from now on; `lost` is called once, with what happened, when the other side has gone or is silent."""
    threading.Thread(target=_keep, args=(connection, silence, lost), daemon=True, name="pulse").start()


def _keep(connection: socket.socket, silence: float, lost: Callable[[str], object]) -> None:
    heard = time.monotonic()
    due = heard
    connection.settimeout(_BEAT_SECONDS / 2)
    with suppress(OSError):
        while (now := time.monotonic()) - heard < silence:
            if now >= due:
                connection.sendall(b".")
                due = now + _BEAT_SECONDS
            with suppress(TimeoutError):
                if not connection.recv(1024):
                    break
                heard = time.monotonic()
        else:
            lost(f"gave no sign of life for {silence:g} s")
            return
    lost("has ended")
