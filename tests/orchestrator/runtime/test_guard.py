"""Which keys a hub with a guard admits, and for how long; other keys are refused. Over real loopback TCP."""

import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from orchestrator.runtime.guard import INVITATION_SECONDS, Guard, Pins
from orchestrator.runtime.hub import Arrival, Hub
from protocol.errors import InputError
from protocol.messages.worker import FromWorker, Ping, Pong, ToWorker
from protocol.security.keys import JoinLine, KeyPair, one_time_keys
from protocol.transport import Link, Stamp, connected_dealer
from tests.support.processes import until

STAMP = Stamp(epoch=7, incarnation=3)
SERVER = KeyPair(*zmq.curve_keypair())
GUEST = KeyPair(*zmq.curve_keypair())
OTHER = KeyPair(*zmq.curve_keypair())


class GuardedHub:
    """A hub with a guard, and a clock that the test moves."""

    def __init__(
        self, folder: Path, address: str = "tcp://127.0.0.1:0", expected: Any = FromWorker, **more: Any
    ) -> None:
        self.context = zmq.Context[Any]()
        self.pin = Pins(folder).add
        self.now = 100.0
        self.guard = Guard(self.context, folder)
        self.hub = Hub(self.context, address, expected, guard=self.guard, keys=SERVER, **more)
        self.port = int(self.hub.address.rpartition(":")[2])
        self.links: list[Link] = []
        self.arrived: list[Arrival] = []

    def link(self, keys: KeyPair, server: bytes = SERVER.public) -> Link:
        link = Link(self.context, self.hub.address, STAMP, ToWorker, server=server, keys=keys)
        self.links.append(link)
        return link

    def turn(self) -> Any:
        self.guard.handle(self.now)
        self.arrived += self.hub.receive()
        for link in self.links:
            link.receive(0)

    def until(self, condition: Callable[[], Any]) -> None:
        until(lambda: (self.turn(), condition())[1])

    def hear(self, link: Link) -> Arrival:
        """The hub's arrival for one more message of `link`."""
        before = len(self.arrived)
        link.send(Pong(0.5))
        self.until(lambda: len(self.arrived) > before)
        return self.arrived[-1]

    def refused(self, link: Link) -> bool:
        """Whether a link is not admitted; nothing that it sent has arrived."""
        before = len(self.arrived)
        link.send(Pong(0.5))
        self.until(lambda: link.state not in ("connecting", "up"))
        return len(self.arrived) == before and link.state == "denied"

    def close(self) -> None:
        for link in self.links:
            link.socket.close(linger=0)
        self.hub.close()
        if not self.guard.socket.closed:
            self.guard.close()
        self.context.destroy(linger=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "server"


@pytest.fixture
def guarded(folder: Path) -> Iterator[GuardedHub]:
    guarded = GuardedHub(folder)
    yield guarded
    guarded.close()


def test_a_pinned_guest_is_admitted_identified_by_its_key_and_answered_and_no_other_key(guarded: GuardedHub):
    name = guarded.pin("studio", GUEST.public)
    link = guarded.link(GUEST)

    arrival = guarded.hear(link)
    assert (arrival.message, arrival.stamp, arrival.identity) == (Pong(0.5), STAMP, GUEST.public)
    assert guarded.guard.pins.name_of(arrival.identity) == name == "studio"
    assert link.state == "up"
    assert guarded.hub.send(arrival.peer, Ping(4.0), STAMP)
    assert until(lambda: link.receive(1.0)) == [Ping(4.0)]
    assert guarded.refused(guarded.link(OTHER))
    assert guarded.guard.denied == 1


def test_a_guest_does_not_speak_to_a_server_with_another_key(guarded: GuardedHub):
    guarded.pin("studio", GUEST.public)
    link = guarded.link(GUEST, server=OTHER.public)
    link.send(Pong(0.5))

    guarded.until(lambda: link.state == "wrong server")
    assert guarded.arrived == []


def test_a_peer_without_keys_is_denied(guarded: GuardedHub):
    with connected_dealer(guarded.context, guarded.hub.address) as naked:
        naked.send(b"hello")
        known = guarded.link(GUEST)
        guarded.pin("studio", GUEST.public)
        guarded.hear(known)

    assert len(guarded.arrived) == 1
    assert guarded.hub.rejected == guarded.hub.not_admitted == 0


def test_without_a_guard_all_keys_are_denied(guarded: GuardedHub):
    """libzmq's default is the opposite: without a handler it admits every key."""
    guarded.pin("studio", GUEST.public)
    guarded.guard.close()
    link = guarded.link(GUEST)
    link.send(Pong(0.5))

    until(lambda: link.receive(0) or link.state == "wrong server")
    assert list(guarded.hub.receive()) == []


def test_messages_of_a_revoked_guest_are_dropped_on_an_open_connection(guarded: GuardedHub):
    guarded.pin("studio", GUEST.public)
    guarded.pin("mini", OTHER.public)
    revoked, kept = guarded.link(GUEST), guarded.link(OTHER)
    guarded.hear(revoked)

    assert guarded.guard.revoke("studio") == GUEST.public
    revoked.send(Pong(1.0))
    guarded.until(lambda: guarded.hub.not_admitted == 1)
    assert guarded.hear(kept).identity == OTHER.public
    assert [arrival.identity for arrival in guarded.arrived] == [GUEST.public, OTHER.public]
    assert guarded.refused(guarded.link(GUEST))


def test_a_join_line_suffices_to_admit_a_guest(guarded: GuardedHub):
    line = JoinLine("127.0.0.1", 1, SERVER.public, guarded.guard.invite(guarded.now))
    keys = JoinLine.parse(str(line)).one_time_keys()

    arrival = guarded.hear(guarded.link(keys))
    assert arrival.identity == keys.public
    assert guarded.guard.pins.name_of(arrival.identity) is None
    assert guarded.guard.redeem(arrival.identity, "studio", GUEST.public, guarded.now) == "studio"
    assert guarded.hear(guarded.link(GUEST)).identity == GUEST.public


def test_a_join_line_is_good_once(guarded: GuardedHub):
    keys = one_time_keys(guarded.guard.invite(guarded.now))
    first, second = guarded.link(keys), guarded.link(keys)
    guarded.hear(first)
    guarded.hear(second)
    guarded.guard.redeem(keys.public, "studio", GUEST.public, guarded.now)

    first.send(Pong(1.0))
    second.send(Pong(1.0))
    guarded.until(lambda: guarded.hub.not_admitted == 2)
    assert guarded.refused(guarded.link(keys))
    with pytest.raises(InputError, match="was used or is older than ten minutes: ask for a new one"):
        guarded.guard.redeem(keys.public, "again", OTHER.public, guarded.now)
    assert guarded.guard.pins.by_name == {"studio": GUEST.public}


def test_a_join_line_is_good_for_ten_minutes(guarded: GuardedHub):
    keys = one_time_keys(guarded.guard.invite(guarded.now))
    guarded.now += INVITATION_SECONDS - 0.001
    early = guarded.link(keys)
    guarded.hear(early)

    guarded.now += 0.001
    assert guarded.refused(guarded.link(keys))
    early.send(Pong(1.0))
    guarded.until(lambda: guarded.hub.not_admitted == 1)
    with pytest.raises(InputError, match="older than ten minutes"):
        guarded.guard.redeem(keys.public, "studio", GUEST.public, guarded.now)


def test_a_refused_redemption_leaves_the_join_line_good(guarded: GuardedHub):
    keys = one_time_keys(guarded.guard.invite(guarded.now))

    with pytest.raises(InputError, match="must be 32 bytes in Z85"):
        guarded.guard.redeem(keys.public, "studio", b"no key", guarded.now)
    with pytest.raises(InputError, match="with its own key"):
        guarded.guard.redeem(keys.public, "studio", keys.public, guarded.now)
    guarded.pin("mini", OTHER.public)
    with pytest.raises(InputError, match="was used"):
        guarded.guard.redeem(OTHER.public, "other", GUEST.public, guarded.now)
    assert guarded.guard.redeem(keys.public, "studio", GUEST.public, guarded.now) == "studio"


def test_the_number_of_invitations_is_limited(guarded: GuardedHub):
    for _ in range(64):
        guarded.guard.invite(guarded.now)

    with pytest.raises(InputError, match="64 join lines are unused"):
        guarded.guard.invite(guarded.now)
    guarded.now += INVITATION_SECONDS
    guarded.guard.invite(guarded.now)


def test_pins_are_private_outlive_the_server_and_are_shared_by_pipelines(guarded: GuardedHub, folder: Path):
    with zmq.Context[Any]() as context:
        other = Guard(context, folder)
        guarded.pin("studio", GUEST.public)
        guarded.pin("mini", OTHER.public)
        assert stat.S_IMODE((folder / "pins.json").stat().st_mode) == 0o600

        other.revoke("studio")
        assert other.pins.by_name == {"mini": OTHER.public}
        other.close()
    with zmq.Context[Any]() as context:
        again = Guard(context, folder)
        assert again.pins.by_name == {"mini": OTHER.public}
        again.close()
    assert guarded.refused(guarded.link(GUEST))
    assert guarded.hear(guarded.link(OTHER)).identity == OTHER.public


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("studio", "studio-2"),
        ("Anna’s Mac", "Anna-s-Mac"),
        ("\x1b[2J\n", "2J"),
        ("../../etc", "etc"),
        ("", "guest"),
        ("x" * 300, "x" * 48),
        ("日本", "guest"),
    ],
)
def test_a_guest_gets_a_name_that_is_its_own_and_harms_no_terminal(guarded: GuardedHub, given: str, kept: str):
    guarded.pin("studio", OTHER.public)

    assert guarded.pin(given, GUEST.public) == kept


def test_a_pinned_key_keeps_its_name_and_an_unknown_one_is_answered_with_those_there_are(guarded: GuardedHub):
    assert guarded.pin("studio", GUEST.public) == guarded.pin("another", GUEST.public) == "studio"
    with pytest.raises(InputError, match=r"No machine is called 'mini' \(known: studio\)"):
        guarded.guard.revoke("mini")


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"studio": 5}', b"\xff"])
def test_damaged_pins_are_refused(folder: Path, content: bytes):
    folder.mkdir(mode=0o700)
    (folder / "pins.json").write_bytes(content)
    (folder / "pins.json").chmod(0o600)

    with zmq.Context[Any]() as context, pytest.raises(InputError, match=r"pins.json is damaged .*: remove it"):
        Guard(context, folder)


def test_pins_that_others_may_have_written_are_refused(folder: Path, guarded: GuardedHub):
    guarded.pin("studio", GUEST.public)
    guarded.hear(guarded.link(GUEST))
    (folder / "pins.json").chmod(0o666)

    with zmq.Context[Any]() as context, pytest.raises(InputError, match="Other users can read"):
        Guard(context, folder)
    # A running server continues with the pins that it has read.
    assert guarded.hear(guarded.link(GUEST)).identity == GUEST.public


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.4", "*", "[::]", "example.org"])
def test_a_hub_beyond_this_machine_needs_keys_and_a_guard(guarded: GuardedHub, host: str):
    halves: list[dict[str, Any]] = [{}, {"keys": SERVER}, {"guard": guarded.guard}]
    for half in halves:
        with pytest.raises(InputError, match=r"it needs keys|is not an address"):
            Hub(guarded.context, f"tcp://{host}:5570", FromWorker, **half)


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has no second loopback address")
def test_a_hub_with_keys_may_listen_on_other_addresses(guarded: GuardedHub):
    """127.0.0.2 needs keys, and the network still can't reach it."""
    hub = Hub(guarded.context, "tcp://127.0.0.2:0", FromWorker, guard=guarded.guard, keys=SERVER)

    assert hub.address.startswith("tcp://127.0.0.2:")
    hub.close()


@pytest.mark.parametrize("given", [{}, {"server": SERVER.public}, {"keys": GUEST}])
def test_a_link_beyond_this_machine_needs_both_keys(guarded: GuardedHub, given: dict[str, Any]):
    with pytest.raises(InputError, match="it needs keys"):
        Link(guarded.context, "tcp://192.0.2.1:5570", STAMP, ToWorker, **given)


def test_ipv6_works_the_same(folder: Path):
    if not _has_ipv6():
        pytest.skip("no IPv6 loopback here")
    guarded = GuardedHub(folder, "tcp://[::1]:0")
    guarded.pin("studio", GUEST.public)

    assert guarded.hear(guarded.link(GUEST)).identity == GUEST.public
    guarded.close()


def test_a_request_of_another_domain_or_mechanism_is_denied(guarded: GuardedHub):
    guarded.pin("studio", GUEST.public)
    key = z85.decode(GUEST.public)
    with guarded.context.socket(zmq.REQ) as asker:
        asker.connect("inproc://zeromq.zap.01")
        for domain, mechanism, credentials in (
            (b"", b"CURVE", [key]),
            (b"launch-pipeline", b"NULL", []),
            (b"launch-pipeline", b"PLAIN", [b"user", b"password"]),
            (b"launch-pipeline", b"CURVE", [key, key]),
        ):
            asker.send_multipart([b"1.0", b"1", domain, b"127.0.0.1", b"", mechanism, *credentials])
            guarded.guard.handle(guarded.now)
            assert asker.recv_multipart()[2] == b"400"


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
