"""How workers of other machines join a pipeline: options, what its owner is told, announcements on their network.

Discovery is DNS-SD over multicast DNS (RFC 6762, 6763), with the optional zeroconf. A result is an address and a public
key to compare. It is not trusted: CURVE proves the key.
"""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import click

from orchestrator.api.owner import Owner, attach_command
from orchestrator.api.settings import PipelineSettings
from orchestrator.cli.pipeline_options import Command, option
from orchestrator.machine.servers import KnownServer
from protocol.contracts.engines import TargetEngineName
from protocol.errors import InputError
from protocol.ineffective import SET, Ineffective
from protocol.messages.client import PipelineState
from protocol.messages.remote import Invitation
from protocol.security.addresses import Endpoint
from protocol.security.keys import JoinLine

_ASKED = Ineffective("the pipeline that is asked has its workers already", running=SET)
_target_engine_option = option(
    "--target-engine",
    _ASKED,
    type=click.Choice(get_args(TargetEngineName)),
    default="mlx",
    show_default=True,
    help="none: wait for a target of another machine; --target then gives the tokenizer.",
)
_announce_option = option(
    "--announce",
    _ASKED,
    metavar="NAME",
    help="Be found under this name on the local network.",
)


def listening_options(command: Command, *, required: bool = False) -> Command:
    """--listen and --target-engine, which are fields of `PipelineSettings`, and --announce."""
    words = "Let workers of other machines in at HOST:PORT; port 0 picks one."
    listen = option(
        "--listen",
        _ASKED,
        metavar="HOST:PORT",
        required=required,
        help=words,
    )
    return listen(_target_engine_option(_announce_option(command)))


def require_listening(announce: str | None, settings: PipelineSettings) -> None:
    """Raises InputError if there is nothing to announce."""
    if announce and settings.listen is None:
        raise InputError("--announce says where workers may come: add --listen HOST:PORT.")


@contextmanager
def invited(owner: Owner, state: PipelineState, name: str | None, *, err: bool = False) -> Iterator[None]:
    """Print how a worker joins, and announce the address as `name` meanwhile. `state`: of the pipeline. `err`: on
    stderr."""
    invitation = owner.invite()
    click.echo(_welcome(invitation, state), err=err)
    line = JoinLine.parse(invitation.line)
    if name is None:
        yield
        return
    with announced(name, KnownServer(Endpoint(line.host, line.port), line.server)):
        yield


def _welcome(invitation: Invitation, state: PipelineState) -> str:
    """How workers of other machines join, for the owner of a new pipeline."""
    return (
        f"On the other machine, within {invitation.seconds / 60:.0f} minutes:\n\n"
        f"  {attach_command(invitation, state)}\n\n"
        "Another line: launch-pipeline workers invite\nWho is there: launch-pipeline workers list"
    )


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
