"""A hub that listens on a network, under fire: strangers without keys, and an admitted guest that lies.

The long runs: `bin/test -m slow` with this file; what they gave is in
docs/log/2026-11-20-hostile-bytes-message-costs.md.
"""

import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import zmq

from orchestrator.core.events import Arrived, Event, Submitted, Task, WorkerDown, WorkerUp
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.lab.simulate.acceptance import VOCABULARY
from orchestrator.lab.simulate.workers import modelled_hello
from orchestrator.runtime.guard import Guard, Pins
from orchestrator.runtime.hub import Arrival, Hub
from protocol.errors import WireError
from protocol.messages.base import NodeId, RequestId, Role
from protocol.messages.kv import KvOffer
from protocol.messages.remote import MAX_PAYLOAD, FromRemote, KvBlock, Shipment
from protocol.messages.sampling import Sampling
from protocol.messages.worker import CacheOff, Fault, FromWorker, Grow, Hello, Pong, Prefilled, ToWorker, Verdict
from protocol.security.keys import KeyPair
from protocol.speculation.token_tree import node_id
from protocol.transport import MAX_WORKER_FRAME, Link, Stamp, connected_dealer, decode, encode
from tests.support import hostile
from tests.support.processes import until

STAMP = Stamp(epoch=7, incarnation=3)
SERVER, GOOD, EVIL = (KeyPair(*zmq.curve_keypair()) for _ in range(3))
ONE = RequestId(1)
PROMPT = (1, 2, 3)
ROOT = node_id(NodeId(0), PROMPT[-1])
NODES = tuple(ROOT if depth == 0 else node_id(ROOT, depth) for depth in range(8))
MESSAGES: list[FromWorker] = [
    Hello("draft", "mlx", "m", "llama", VOCABULARY, 64, "same", "cpu", 1),
    Prefilled(ONE, 0, len(PROMPT) - 1, 0.5),
    Grow(ONE, 0, NODES, tuple(range(8)), (0.5,) * 8, 2, 0.1),
    Grow(ONE, 0, (ROOT,) * 8, tuple(range(8)), (0.1,) * 8, 1, 0.1),
    Verdict(ONE, 0, (), 9, 0.1),
    Verdict(ONE, 1, (NODES[1],), 9, 0.1),
    Fault("lost", "gone", ONE),
    Fault("refused", "no", ONE),
    KvOffer(ONE, "lp-0123456789abcdef0123", 2, 4096, 0.0),
    CacheOff("full"),
    Pong(1.5, 7),
]
FRAMES = [encode(message, STAMP) for message in MESSAGES]


def memory() -> float:
    """MiB that this process has ever had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


class AttackedHub:
    """A hub on loopback TCP with one honest guest and one that is not."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context[Any]()
        self.guard = Guard(self.context, folder)
        Pins(folder).add("good", GOOD.public)
        Pins(folder).add("liar", EVIL.public)
        self.hub = Hub(
            self.context, "tcp://127.0.0.1:0", FromRemote, guard=self.guard, keys=SERVER, limit=MAX_WORKER_FRAME
        )
        self.port = int(self.hub.address.rpartition(":")[2])
        self.good, self.liar = (
            Link(self.context, self.hub.address, STAMP, ToWorker, server=SERVER.public, keys=keys)
            for keys in (GOOD, EVIL)
        )
        self.lies: Counter[str] = Counter()
        """Frames of the lying machine that were messages, by type."""
        self.pongs = 0

    def turn(self) -> list[Arrival]:
        self.guard.handle(0.0)
        arrivals = list(self.hub.receive())
        for arrival in arrivals:
            assert arrival.identity in (GOOD.public, EVIL.public)
            if arrival.identity == EVIL.public:
                self.lies[type(arrival.message).__name__] += 1
            else:
                self.pongs += 1
        return arrivals

    @property
    def taken(self) -> int:
        """Frames of the lying machine that were dealt with in one way or the other."""
        return self.lies.total() + self.hub.rejected

    def has_taken(self, count: int) -> bool:
        return self.taken >= count

    def until(self, condition: Callable[[], bool]) -> None:
        until(lambda: (self.turn(), condition())[1])

    def serves(self) -> None:
        """Messages of the honest machine arrive, and no others under its name."""
        before = self.pongs
        self.good.send(Pong(0.5))
        self.until(lambda: self.pongs > before)
        assert self.pongs == before + 1

    def close(self) -> None:
        for link in (self.good, self.liar):
            link.socket.close(linger=0)
        self.hub.close()
        self.guard.close()
        self.context.destroy(linger=0)


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
        attacked.until(partial(attacked.has_taken, goal))
    assert attacked.taken == end
    assert attacked.hub.rejected - rejected > count / 4
    attacked.serves()


def test_every_message_of_an_admitted_liar_is_handled_or_counted(attacked: AttackedHub):
    bombard(attacked, 2000, seed=1)


def test_strangers_at_the_port_change_nothing(attacked: AttackedHub):
    for blob in islice(hostile.blobs(seed=2), 300):
        hostile.throw(attacked.port, blob)
        attacked.turn()

    attacked.serves()
    assert attacked.lies.total() == attacked.hub.rejected == attacked.hub.not_admitted == attacked.guard.denied == 0


def test_a_peer_without_keys_costs_nothing_but_its_own_connection(attacked: AttackedHub):
    naked = [connected_dealer(attacked.context, attacked.hub.address) for _ in range(20)]
    for dealer in naked:
        dealer.send(FRAMES[0])
    attacked.serves()

    assert attacked.lies.total() == attacked.hub.rejected == 0
    for dealer in naked:
        dealer.close(linger=0)


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
        flooder.setsockopt(zmq.CURVE_PUBLICKEY, EVIL.public)
        flooder.setsockopt(zmq.CURVE_SECRETKEY, EVIL.secret)
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


def live() -> Machine:
    """A machine in the middle of a request."""
    machine = Machine(Options())
    machine.step(WorkerUp(1, modelled_hello("target")), 0.0)
    machine.step(WorkerUp(2, modelled_hello("draft")), 0.0)
    machine.step(Submitted(ONE, Task(PROMPT, Sampling(), 60)), 0.0)
    machine.step(Arrived("target", 1, Prefilled(ONE, 0, len(PROMPT) - 1, 0.1)), 0.1)
    return machine


def lie_to_the_machine(count: int, seed: int) -> tuple[int, int]:
    """Feed what of mutated frames is a message to a machine that believes it came from its workers; (messages, all).

    No exception, and nothing that grows without end; a request that the lies ended is asked anew.
    """
    machine, told = live(), 0
    for number, frame in enumerate(islice(hostile.mutations(FRAMES, seed), count)):
        try:
            _, message = decode(frame, FromWorker, MAX_WORKER_FRAME)
        except WireError:
            continue
        told += 1
        now = 0.2 + 1e-3 * number
        roles: tuple[tuple[Role, int], ...] = (("draft", 2), ("target", 1))
        events: list[Event] = [Arrived(role, incarnation, message) for role, incarnation in roles]
        for event in events:
            machine.step(event, now).all()
        assert all(len(sequence.tree) <= 1 << 13 for sequence in machine.requests.values())
        if ONE not in machine.requests or number % 500 == 0:
            for role, incarnation in roles:
                machine.step(WorkerDown(role, incarnation), now)
            machine = live()
    return told, count


def test_no_lie_brings_the_state_machine_down():
    told, count = lie_to_the_machine(4000, seed=3)

    assert told > count / 20


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_million_mutated_frames(attacked: AttackedHub, capsys: pytest.CaptureFixture[str]):
    bombard(attacked, 20_000, seed=4)
    lie_to_the_machine(20_000, seed=5)
    before = memory()
    told, count = lie_to_the_machine(860_000, seed=6)
    bombard(attacked, 100_000, seed=7)

    grown = memory() - before
    with capsys.disabled():
        print(f"\n10^6 frames; of {count} in process {told} were messages; +{grown:.1f} MiB")
    assert grown < 64


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_hundred_thousand_blobs(attacked: AttackedHub, capsys: pytest.CaptureFixture[str]):
    waves = hostile.blobs(seed=7)
    for blob in islice(waves, 5_000):
        hostile.throw(attacked.port, blob)
    attacked.serves()
    before = memory()
    for number, blob in enumerate(islice(waves, 95_000)):
        hostile.throw(attacked.port, blob)
        if number % 1000 == 0:
            attacked.serves()
    attacked.serves()

    grown = memory() - before
    with capsys.disabled():
        print(f"\n10^5 blobs; +{grown:.1f} MiB")
    assert grown < 64
    assert attacked.lies.total() == attacked.hub.rejected == attacked.hub.not_admitted == 0
