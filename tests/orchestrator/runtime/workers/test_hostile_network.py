"""A hub that listens on a network, under fire: strangers without keys, and an admitted guest that lies.

The long runs: `bin/test -m slow` with this file; what they gave is in
docs/log/2026-11-20-hostile-bytes-message-costs.md.
"""

import resource
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import zmq

from orchestrator.lab.simulate.workers import modelled_hello
from orchestrator.runtime.hub import Arrival
from protocol.messages.base import NodeId, RequestId
from protocol.messages.kv import KvOffer
from protocol.messages.remote import MAX_PAYLOAD, FromRemote, KvBlock, Shipment
from protocol.messages.worker import Fault, Grow, Pong, Prefilled, Verdict
from protocol.transport import MAX_WORKER_FRAME, encode
from tests.orchestrator.runtime.test_guard import GUEST, OTHER, SERVER, STAMP, GuardedHub
from tests.support import hostile
from tests.support.processes import until

ONE = RequestId(1)
FRAMES = [
    encode(message, STAMP)
    for message in (
        modelled_hello("draft"),
        Prefilled(ONE, 0, 2, 0.5),
        Grow(ONE, 0, (NodeId(1),) * 8, tuple(range(8)), (0.5,) * 8, 2, 0.1),
        Verdict(ONE, 1, (NodeId(1),), 9, 0.1),
        Fault("lost", "gone", ONE),
        KvOffer(ONE, "lp-0123456789abcdef0123", 2, 4096, 0.0),
        Pong(1.5),
    )
]


def memory() -> float:
    """MiB that this process has ever had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


class AttackedHub(GuardedHub):
    """A hub with one honest guest and one that is not."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, expected=FromRemote, limit=MAX_WORKER_FRAME)
        self.pin("good", GUEST.public)
        self.pin("liar", OTHER.public)
        self.good, self.liar = self.link(GUEST), self.link(OTHER)
        self.links.clear()
        self.lies = self.truths = 0
        """Frames of each that were messages."""

    def turn(self) -> list[Arrival]:
        self.guard.handle(0.0)
        arrivals = list(self.hub.receive())
        for arrival in arrivals:
            assert arrival.identity in (GUEST.public, OTHER.public)
            self.lies += arrival.identity == OTHER.public
            self.truths += arrival.identity == GUEST.public
        return arrivals

    @property
    def taken(self) -> int:
        """Frames of the lying machine that were dealt with in one way or the other."""
        return self.lies + self.hub.rejected

    def serves(self) -> None:
        """Messages of the honest machine arrive, and no others under its name."""
        before = self.truths
        self.good.send(Pong(0.5))
        self.until(lambda: self.truths > before)
        assert self.truths == before + 1

    def close(self) -> None:
        self.links += [self.good, self.liar]
        super().close()


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[AttackedHub]:
    attacked = AttackedHub(tmp_path / "keys")
    attacked.serves()
    yield attacked
    attacked.close()


def bombard(attacked: AttackedHub, count: int, seed: int) -> None:
    """An admitted guest sends frames that are damaged or lie; every one is taken in or counted."""
    waves = hostile.mutations(FRAMES, seed)
    rejected, end = attacked.hub.rejected, attacked.taken + count
    while attacked.taken < end:
        goal = min(end, attacked.taken + 50)
        for frame in islice(waves, goal - attacked.taken):
            # Larger ones cost the connection; they have a test of their own.
            attacked.liar.socket.send(frame[:MAX_WORKER_FRAME])
        attacked.until(lambda goal=goal: attacked.taken >= goal)
    assert attacked.taken == end
    assert attacked.hub.rejected - rejected > count / 4
    attacked.serves()


def bombard_from_outside(attacked: AttackedHub, count: int, seed: int) -> None:
    for number, blob in enumerate(islice(hostile.blobs(seed), count)):
        hostile.throw(attacked.port, blob)
        attacked.turn()
        if number % 1000 == 0:
            attacked.serves()
    attacked.serves()
    assert attacked.taken == attacked.hub.not_admitted == attacked.guard.denied == 0


def test_every_message_of_an_admitted_liar_is_handled_or_counted(attacked: AttackedHub):
    bombard(attacked, 2000, seed=1)


def test_strangers_at_the_port_change_nothing(attacked: AttackedHub):
    bombard_from_outside(attacked, 300, seed=2)


def test_a_block_of_keys_and_values_as_large_as_they_come_passes(attacked: AttackedHub):
    block = KvBlock(ONE, 1, 0, 1, 0)
    attacked.good.send(Shipment(block, bytes(MAX_PAYLOAD)))
    arrivals: list[Arrival] = []
    until(lambda: arrivals.extend(attacked.turn()) or arrivals)

    assert [(arrival.message, len(arrival.payload)) for arrival in arrivals] == [(block, MAX_PAYLOAD)]


def test_a_frame_beyond_the_cap_costs_the_guest_its_connection_only(attacked: AttackedHub):
    attacked.liar.send(Pong(0.0))
    attacked.until(lambda: attacked.taken == 1)
    attacked.liar.socket.send(bytes(MAX_WORKER_FRAME + 1))
    attacked.until(lambda: bool(attacked.liar.receive(0)) or attacked.liar.state == "down")

    attacked.serves()
    assert attacked.taken == 1


def test_a_guest_that_floods_fills_no_more_than_its_share(attacked: AttackedHub):
    """What the hub has not read yet waits at the guest."""
    with attacked.context.socket(zmq.DEALER) as flooder:
        flooder.setsockopt(zmq.LINGER, 0)
        flooder.setsockopt(zmq.SNDHWM, 1)
        flooder.setsockopt(zmq.CURVE_SERVERKEY, SERVER.public)
        flooder.setsockopt(zmq.CURVE_PUBLICKEY, OTHER.public)
        flooder.setsockopt(zmq.CURVE_SECRETKEY, OTHER.secret)
        flooder.connect(attacked.hub.address)
        flooder.send(FRAMES[0])
        attacked.until(lambda: attacked.taken == 1)
        accepted = 0
        while accepted < 1000 and flooder.poll(500, zmq.POLLOUT):
            flooder.send(bytes(MAX_WORKER_FRAME))
            accepted += 1

        # 64 in the hub's queue, and what TCP's buffers hold.
        assert accepted < 100
        attacked.serves()


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("attack", "count"), [(bombard, 100_000), (bombard_from_outside, 95_000)])
def test_a_long_attack_takes_no_memory(attacked: AttackedHub, attack, count: int, capsys: pytest.CaptureFixture[str]):
    attack(attacked, count // 20, seed=4)
    before = memory()
    attack(attacked, count, seed=7)

    grown = memory() - before
    with capsys.disabled():
        print(f"\n{attack.__name__}: {count}; +{grown:.1f} MiB")
    assert grown < 64
