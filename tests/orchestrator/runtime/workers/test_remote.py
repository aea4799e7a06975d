"""Remote workers, some of them hostile: a message is accepted only from the key that its stamp was given to."""

import logging
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from draft_worker.worker import DraftWorker
from orchestrator.cli import attachment
from orchestrator.cli.attachment import Attachment, Lending, lent_worker, raise_refusal
from orchestrator.core.events import Arrived, WorkerDown, WorkerUp
from orchestrator.lab.simulate.workers import modelled_hello
from orchestrator.machine.servers import KnownServer
from orchestrator.runtime.guard import Pins
from orchestrator.runtime.setup import Listening, OrchestratorSetup
from orchestrator.runtime.workers.remote import RemoteWorkers, WorkerEvent
from orchestrator.runtime.workers.remote_registry import RemoteRegistry
from protocol.errors import InputError
from protocol.features.blocks import received, shipments
from protocol.features.ring import FeatureRing
from protocol.kv.arena_header import ElementType
from protocol.messages.base import NodeId, RequestId
from protocol.messages.client import Refused
from protocol.messages.features import (
    FeatureBlock,
    FeatureForm,
    Features,
    FeatureShipment,
    FeaturesTaken,
    Tap,
    Taps,
)
from protocol.messages.kv import KvOffer
from protocol.messages.plans import BestFirst
from protocol.messages.remote import Attach, Join, KvBlock, Leave, Shipment, ToRemote, Welcome
from protocol.messages.sampling import Sampling
from protocol.messages.worker import CacheOff, Fault, Grow, Hello, Ping, Pong, Shutdown, Start, Stop, ToWorker, Verdict
from protocol.security.addresses import endpoint
from protocol.security.keys import KeyPair, own_keys
from protocol.transport import Link, Stamp, encode
from tests.support.conditioned_draft import ConditionedEngine, ConditionedFake, features
from tests.support.fake_draft import VOCABULARY
from tests.support.processes import until
from tests.support.segments import exists

EPOCH = 77
NO_STAMP = Stamp(0, 0)
GUEST, OTHER = KeyPair(*zmq.curve_keypair()), KeyPair(*zmq.curve_keypair())
ONE = RequestId(1)


class Server:
    """Remote workers over loopback TCP, and the events that they cause."""

    def __init__(self, folder: Path, session: Path) -> None:
        self.context = zmq.Context[Any]()
        self.keys = own_keys(folder)
        for name, keys in (("guest", GUEST), ("other", OTHER)):
            Pins(folder).add(name, keys.public)
        numbers = count(5)
        self.registry = RemoteRegistry(lambda: next(numbers), {"prefill": "not here"})
        self.remote = RemoteWorkers(
            self.context,
            OrchestratorSetup(
                session=str(session),
                address="",
                target="",
                draft="",
                listening=Listening(address="tcp://127.0.0.1:0", folder=str(folder)),
            ),
            EPOCH,
            self.registry,
            list,
        )
        self.events: list[WorkerEvent] = []
        self.links: list[Link] = []

    @property
    def address(self) -> str:
        return self.remote.sockets[1].getsockopt_string(zmq.LAST_ENDPOINT)

    def link(self, keys: KeyPair, stamp: Stamp = NO_STAMP, expected: Any = ToRemote) -> Link:
        self.links.append(Link(self.context, self.address, stamp, expected, server=self.keys.public, keys=keys))
        return self.links[-1]

    def turn_until(self, condition: Callable[[], Any]) -> Any:
        def turn() -> Any:
            self.events += self.remote.receive()
            return condition()

        return until(turn)

    def welcome(self, keys: KeyPair, role: Any = "draft") -> Stamp:
        control = self.link(keys)
        control.send(Attach(role, 1))
        (answer,) = self.turn_until(lambda: control.receive(0))
        assert isinstance(answer, Welcome)
        return Stamp(answer.epoch, answer.incarnation)

    def worker(self, *sent: Any, keys: KeyPair = GUEST, stamp: Stamp | None = None, role: str = "draft") -> Link:
        """A guest's, with these messages; without `stamp` it has been welcomed."""
        link = self.link(keys, self.welcome(keys, role) if stamp is None else stamp, ToWorker | FeatureBlock)
        for message in sent:
            link.send(message)
        return link

    def up(self, hello: Hello) -> tuple[int, Link]:
        """The incarnation and the link of a worker that is up."""
        stamp = self.welcome(GUEST, hello.role)
        worker = self.worker(hello, stamp=stamp)
        self.turn_until(lambda: WorkerUp in kinds(self.events))
        return stamp.incarnation, worker

    def hear(self, worker: Link, enough: Callable[[list[Any]], Any]) -> list[Any]:
        """What the worker gets until that is enough."""
        got: list[Any] = []
        self.turn_until(lambda: got.extend(worker.receive(0)) or enough(got))
        return got

    def close(self) -> None:
        self.remote.close()
        for link in self.links:
            link.socket.close(linger=0)
        self.context.destroy(linger=0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(dir="/tmp") as session:
        server = Server(tmp_path / "keys", Path(session))
        yield server
        server.close()


def kinds(events: list[WorkerEvent]) -> list[type]:
    return [type(event.message) if isinstance(event, Arrived) else type(event) for event in events]


NAME = "lp-0123456789abcdef0123"
"""It may be that of a segment of this machine's: no process opens or unlinks it."""
HELLO, TARGET_HELLO = modelled_hello("draft"), modelled_hello("target")
GROW, VERDICT = Grow(ONE, 0, (NodeId(1),), (2,), (0.5,), 1, 0.1), Verdict(ONE, 0, (), 3, 0.1)
TAPS, FORM = Taps(12, 64), FeatureForm((1, 4), 64)
(FEATURES,) = shipments(ONE, 0, 0, FORM, ElementType.FLOAT16, np.ones((3, 128), np.float16))
UNHEARD: dict[str, tuple[str, list[Any], list[type]]] = {
    "an arena": ("draft", [HELLO, KvOffer(ONE, NAME, 40, 4096, 0.0), GROW], [WorkerUp, Grow]),
    "a ring": ("target", [replace(TARGET_HELLO, taps=TAPS), Features(ONE, 0, NAME, 0, 10), VERDICT],
               [WorkerUp, Verdict]),
    "keys and values of a draft": ("draft", [HELLO, Shipment(KvBlock(ONE, 0, 0, 1, 0), bytes(64))], [WorkerUp]),
    "features of a draft": ("draft", [HELLO, FEATURES], [WorkerUp]),
    "features of a target that records none": ("target", [TARGET_HELLO, FEATURES], [WorkerUp]),
    "a full disk": ("target", [TARGET_HELLO, CacheOff("No space left on device"), VERDICT], [WorkerUp, Verdict]),
    "growth before hello": ("draft", [GROW], []),
    "a draft that becomes the target": ("draft", [TARGET_HELLO, VERDICT], []),
}  # fmt: skip


@pytest.mark.parametrize(("role", "sent", "heard"), UNHEARD.values(), ids=UNHEARD)
def test_what_another_machine_has_no_say_in_is_never_heard_of(
    server: Server, role: str, sent: list[Any], heard: list[type]
):
    server.worker(*sent, role=role)
    server.turn_until(lambda: server.remote.stale and len(server.events) >= len(heard))

    assert kinds(server.events) == heard
    assert server.remote.stale == 1
    assert server.remote.intake.dropped == 0


def test_only_a_block_of_keys_and_values_has_a_second_frame_and_it_has_one(server: Server):
    worker, stamp = server.worker(), Stamp(EPOCH, 5)
    block, grow = encode(KvBlock(ONE, 0, 0, 1, 0), stamp), encode(Fault("lost", "", ONE), stamp)
    for frames in ([block], [block, b"a", b"b"], [grow, b"a"], [grow, block]):
        worker.socket.send_multipart(frames)
    worker.send(HELLO)
    server.turn_until(lambda: WorkerUp in kinds(server.events))

    assert kinds(server.events) == [WorkerUp]


def test_a_refusal_can_not_play_with_the_guests_terminal():
    with pytest.raises(InputError, match=r"^no \?\]0;root\?$"):
        raise_refusal(Refused("", "no \x1b]0;root\x07", "input"))


@pytest.mark.parametrize(
    ("keys", "stamp"),
    [(OTHER, Stamp(EPOCH, 5)), *((GUEST, Stamp(*each)) for each in ((EPOCH, 1), (EPOCH, 6), (EPOCH + 1, 5), (0, 0)))],
)
def test_messages_with_another_guests_or_an_unknown_stamp_do_not_count(server: Server, keys: KeyPair, stamp: Stamp):
    """Numbers of the pipeline's own workers included."""
    assert server.welcome(GUEST) == Stamp(EPOCH, 5)
    server.worker(HELLO, VERDICT, keys=keys, stamp=stamp)
    server.turn_until(lambda: server.remote.stale == 2)

    assert server.events == []


def test_a_guest_can_not_let_others_in(server: Server):
    """Only the keys of a join line are good for that."""
    link = server.link(GUEST)
    link.send(Join("guest", OTHER.public.decode()))
    (answer,) = server.turn_until(lambda: link.receive(0))

    assert isinstance(answer, Refused)
    assert "ask for a new one" in answer.text


def test_one_guest_can_not_take_back_anothers_worker(server: Server):
    _, worker = server.up(HELLO)
    server.link(OTHER).send(Leave(1))
    server.worker(Fault("fatal", "I am your draft and I end."), keys=OTHER, stamp=Stamp(EPOCH, 5))
    server.turn_until(lambda: server.remote.stale == 1)
    worker.send(Fault("lost", "", ONE))
    server.turn_until(lambda: Fault in kinds(server.events))

    assert WorkerDown not in kinds(server.events)


def test_a_target_that_is_replaced_is_detached_and_heard_no_more(server: Server):
    incarnation, worker = server.up(TARGET_HELLO)
    (down,) = server.remote.give_up(incarnation, "The target did nothing for a request.")
    worker.send(VERDICT)
    server.turn_until(lambda: server.remote.stale)
    server.hear(worker, lambda got: got[-1:] == [Shutdown()])

    assert down == WorkerDown("target", incarnation)
    assert kinds(server.events) == [WorkerUp]
    assert server.welcome(GUEST, "target").incarnation != incarnation


def test_a_machine_that_comes_and_goes_fills_no_log(server: Server, caplog: pytest.LogCaptureFixture):
    """What another one does is logged meanwhile."""
    with caplog.at_level(logging.INFO):
        control = server.link(GUEST)
        for life in range(300):
            control.send(Attach("draft", life))
            control.send(Leave(life))
        server.turn_until(lambda: kinds(server.events).count(WorkerDown) == 300)
        server.worker(HELLO, keys=OTHER)
        server.turn_until(lambda: WorkerUp in kinds(server.events))

    assert [line.split()[4] for line in caplog.messages] == 20 * ["guest"] + ["other"]


def cut(address: str) -> None:
    """This process's own connections to a TCP address."""
    host, port = address.removeprefix("tcp://").split(":")
    for descriptor in Path("/dev/fd").iterdir():
        with suppress(OSError), socket.fromfd(int(descriptor.name), socket.AF_INET, socket.SOCK_STREAM) as one:
            if one.getpeername() == (host, int(port)):
                one.shutdown(socket.SHUT_RDWR)


def test_a_machine_gives_signs_of_life_while_its_worker_loads(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also by another connection than the one that it attached by, which it lost and has again between two looks."""
    monkeypatch.setattr(attachment, "_POLL_SECONDS", 1.0)
    monkeypatch.setattr(attachment, "worker_command", lambda _: ("sh", "-c", "exec sleep 60"))
    keys, where = own_keys(tmp_path / "guest"), endpoint(server.address)
    assert where is not None
    Pins(tmp_path / "keys").add("third", keys.public)
    known, folder = KnownServer(where, server.keys.public), tmp_path / "guest"
    lending = Lending("draft", known, "third", folder, lent_worker(known, folder, "mlx", ""))
    refusals: list[str] = []

    def attach() -> None:
        with pytest.raises(InputError) as refused:
            Attachment(lending, lambda _: None, lambda _: None).run()
        refusals.append(str(refused.value))

    # A pool would wait for it for ever if the test fails.
    Thread(target=attach, daemon=True).start()
    server.turn_until(lambda: server.registry.of(keys.public))
    (worker,) = server.registry.of(keys.public)
    before = {worker.control}
    worker.heard_at = 0.0
    server.turn_until(lambda: server.remote.ping({}) or worker.heard_at)
    cut(server.address)
    server.turn_until(lambda: worker.control not in before)
    server.remote.dismiss(worker.incarnation, "enough")
    server.turn_until(lambda: refusals == ["enough"])


def test_texts_that_would_play_with_a_terminal_never_get_in(server: Server):
    server.worker(Hello("draft", "mlx", "\x1b]0;root\x07", "llama", 50, 400, "same", "cpu", 1), HELLO)
    server.turn_until(lambda: WorkerUp in kinds(server.events))

    (up,) = server.events
    assert isinstance(up, WorkerUp)
    assert up.hello == HELLO


@pytest.mark.usefixtures("registry")
def test_features_of_another_machines_target_are_in_a_ring_of_this_machine_until_it_goes(server: Server):
    """It hears which blocks have come, those that nobody asked for too."""
    incarnation, worker = server.up(replace(TARGET_HELLO, taps=TAPS))
    server.remote.send(incarnation, Tap(FORM.outputs))
    server.remote.send(incarnation, Start(ONE, 0, (1, 2, 3, 4), NodeId(7), Sampling()))
    stray, *_ = shipments(RequestId(2), 0, 0, FORM, ElementType.FLOAT16, np.ones((3, 128), np.float16))
    for number, (block, payload) in enumerate((stray, FEATURES), start=1):
        worker.send(FeatureShipment(replace(block, number=number), payload))
    got = server.hear(worker, lambda got: FeaturesTaken(2) in got)
    (features,) = (e.message for e in server.events if isinstance(e, Arrived) and isinstance(e.message, Features))
    ring = FeatureRing.attach(features.name)
    found = ring.read(0, 3, FORM.outputs)
    ring.close()
    worker.send(Fault("fatal", "ends"))
    server.turn_until(lambda: WorkerDown in kinds(server.events))

    assert [each for each in got if isinstance(each, FeaturesTaken)] == [FeaturesTaken(1), FeaturesTaken(2)]
    assert (features.first, features.rows) == (0, 3)
    assert found is not None
    assert np.array_equal(found, np.ones((3, 128)))
    assert not exists(features.name)


@pytest.mark.usefixtures("registry")
def test_a_draft_over_the_network_is_fed_the_rows_of_its_own_tokens(server: Server):
    """The ring holds more outputs than it reads. Its engine checks each row."""
    prompt = tuple(2 * token % VOCABULARY for token in range(3, 903))
    recorded = FeatureForm((0, 1, 4), 2)
    ring = FeatureRing.create(recorded, ElementType.FLOAT16, fingerprint="a" * 64, epoch=EPOCH)
    engine = ConditionedEngine()
    draft = DraftWorker(engine, time.perf_counter)
    incarnation, link = server.up(draft.hello())
    server.remote.send(incarnation, Start(ONE, 0, prompt, NodeId(7), Sampling(), BestFirst(2, 3)))
    for first, stop in ((0, 512), (512, 899)):
        ring.write(first, features(first, prompt[first:stop], recorded.outputs).astype(np.float16))
        server.remote.send(incarnation, Features(ONE, 0, ring.name, first, stop - first))

    def worked() -> list[Grow]:
        for message in link.receive(0):
            if isinstance(message, Ping):
                link.send(Pong(message.sent))
            else:
                list(draft.handle(message))
        return [reply for reply in (draft.work() if draft.has_work else ()) if isinstance(reply, Grow)]

    (grow, *_) = server.turn_until(worked)
    ring.unlink()
    ring.close()

    (sequence,) = engine.opened
    assert isinstance(sequence, ConditionedFake)
    assert sequence.positions == {index: index for index in range(899)}
    assert grow.staleness == 0


@pytest.fixture
def fed(server: Server, registry: Path) -> Iterator[tuple[str, int, Link]]:
    """The name of a ring of 3000 rows, and the incarnation and the link of a draft that reads it."""
    ring = FeatureRing.create(FORM, ElementType.FLOAT16, fingerprint="a" * 64, epoch=EPOCH)
    ring.write(0, np.ones((3000, 128), np.float16))
    yield ring.name, *server.up(replace(HELLO, features=FORM))
    ring.unlink()
    ring.close()


def test_a_draft_that_reads_features_gets_their_bytes_and_no_name(server: Server, fed: tuple[str, int, Link]):
    """Four blocks at most are under way until it answers a Ping behind them; Stop ends the rest."""
    ring, draft, worker = fed
    server.remote.send(draft, Features(ONE, 0, ring, 0, 3000))
    got = server.hear(worker, lambda got: sum(isinstance(m, Ping) for m in got) >= 2)
    blocks = [message for message in got if isinstance(message, FeatureShipment)]
    again = [message for message in got if isinstance(message, Ping)][-1]
    worker.send(Pong(again.sent))
    server.remote.send(draft, Stop(ONE))
    got += server.hear(worker, lambda got: any(isinstance(m, Stop) for m in got))

    assert not any(isinstance(message, Features) for message in got)
    assert [(shipment.block.first, shipment.block.rows) for shipment in blocks] == [(0, 2048), (2048, 952)]
    assert all(received(*shipment) is not None for shipment in blocks)


def test_after_a_fault_a_draft_gets_the_rows_of_its_sequence_again(server: Server, fed: tuple[str, int, Link]):
    """No Stop follows: the draft has dropped the sequence already."""
    ring, draft, worker = fed

    def blocks() -> list[Any]:
        found = server.hear(worker, lambda got: any(isinstance(message, FeatureShipment) for message in got))
        return [(each.block.first, each.block.rows) for each in found if isinstance(each, FeatureShipment)]

    for _ in range(2):
        server.remote.send(draft, Features(ONE, 0, ring, 0, 10))
    before = blocks()
    worker.send(Fault("refused", "no", ONE))
    server.turn_until(lambda: Fault in kinds(server.events))
    server.remote.send(draft, Features(ONE, 0, ring, 0, 10))

    assert [before, blocks()] == [[(0, 10)]] * 2


def test_a_draft_that_reads_tokens_alone_gets_no_features(server: Server):
    draft, worker = server.up(HELLO)
    server.remote.send(draft, Features(ONE, 0, NAME, 0, 10))
    server.remote.send(draft, Stop(ONE))
    got = server.hear(worker, lambda got: any(isinstance(m, Stop) for m in got))

    assert {type(message) for message in got} == {Ping, Stop}
