"""Where a pipeline lets workers of other machines in: checked before anything is started."""

import socket

from orchestrator.machine.known_servers import host_port
from orchestrator.runtime.setup import Listening
from protocol.contracts.engines import PrefillEngineName, TargetEngineName
from protocol.errors import InputError
from protocol.paths import keys_folder
from protocol.security.addresses import tcp_address


def listening(where: str) -> Listening:
    """For `--listen HOST:PORT`. Raises InputError if this machine has no such address."""
    host, port = host_port(where, listening=True)
    try:
        # libzmq listens on addresses, not on names.
        numeric = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise InputError(
            f"--listen {where}: {host} has no address here ({error.strerror}): give an address."
        ) from error
    return Listening(address=tcp_address(numeric, port, listening=True), folder=str(keys_folder()))


def require_served(
    target: TargetEngineName, prefill: PrefillEngineName, listening: Listening | None, divided: bool = False
) -> None:
    """Without a target of its own a pipeline must let one come, and can't hand it KV in shared memory."""
    if target == "none" and listening is None:
        raise InputError("--target-engine none waits for a target of another machine: add --listen HOST:PORT.")
    if target == "none" and divided:
        raise InputError(
            "--target-hosts divides a target that this machine leads, and --target-engine none starts none: "
            "leave one of them out."
        )
    if target == "none" and prefill != "none":
        raise InputError(
            "A prefill engine hands KV over in shared memory, which a target elsewhere can't reach: "
            "leave --prefill-engine away, or use a target on this machine."
        )
    if prefill == "guest" and listening is None:
        raise InputError("--prefill-engine guest waits for a worker of another machine: add --listen HOST:PORT.")
