"""Laws of codec and sockets: valid frames pass, others are dropped and counted, bad addresses are refused."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgpack
import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings

from orchestrator.runtime.hub import Hub
from protocol.errors import InputError, WireError
from protocol.features.blocks import shipments
from protocol.kv.arena_header import ElementType
from protocol.messages.base import VERSION, NodeId, RequestId
from protocol.messages.client import Cancel, FromClient, Submit, ToClient
from protocol.messages.features import FeatureBlock, FeatureForm
from protocol.messages.sampling import RequestedSampling, Sampling, TokenLogprob
from protocol.messages.worker import (
    Fault,
    FromWorker,
    Grow,
    Hello,
    Ping,
    Pong,
    Prefilled,
    PromptLogprobs,
    Reroot,
    Start,
    Stop,
    ToWorker,
    Verdict,
    Verify,
)
from protocol.security.addresses import require_local
from protocol.transport import MAX_FRAME, Link, Stamp, connected_dealer, decode, encode
from tests.support.processes import until

STAMP = Stamp(epoch=7, incarnation=3)
NODES = (NodeId(1), NodeId(2))
HELLO = Hello("draft", "mlx", "m", "llama", 32, 64, "t", "cpu", 1, costs=((1, 0.02), (5, 0.03)))
MESSAGES: list[tuple[Any, Any]] = [
    (HELLO, FromWorker),
    (Prefilled(RequestId(1), 0, 5, 0.5), FromWorker),
    (PromptLogprobs(RequestId(1), 0, 5, (TokenLogprob(-0.5, ((3, -0.5), (4, -1.0))),)), FromWorker),
    (Grow(RequestId(1), 2, NODES, (3, 4), (0.5, 0.25), 2, 0.1), FromWorker),
    (Verdict(RequestId(1), 2, NODES, 9, 0.1), FromWorker),
    (Fault("lost", "gone", RequestId(1)), FromWorker),
    (Pong(1.5), FromWorker),
    (Start(RequestId(1), 0, (1, 2, 3), NodeId(5), Sampling(temperature=0.5, logit_bias=((1, 2.0),))), ToWorker),
    (Reroot(RequestId(1), 1, 4, (5, 6), NodeId(7), missed=True), ToWorker),
    (Verify(RequestId(1), 1, NodeId(7), 6, (6, 1), (-1, 0)), ToWorker),
    (Stop(RequestId(1)), ToWorker),
    (Submit("r", "text", None, RequestedSampling(), 5, ("stop",)), FromClient),
    (Cancel("r"), FromClient),
]
UNIONS = [FromWorker, ToWorker, FromClient, ToClient]


def body(message: Any) -> dict[str, Any]:
    return msgspec.to_builtins(message)


def frame(content: object) -> bytes:
    packed = msgpack.packb(content)
    assert packed is not None
    return packed


@pytest.mark.parametrize(("message", "union"), MESSAGES, ids=[type(message).__name__ for message, _ in MESSAGES])
def test_decoding_inverts_encoding_in_the_direction_of_the_message(message: Any, union: Any):
    assert decode(encode(message, STAMP), union) == (STAMP, message)
    for other in UNIONS:
        if other is not union:
            with pytest.raises(WireError):
                decode(encode(message, STAMP), other)


BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "not msgpack": b"\xc1",
    "cut short": encode(Ping(1.0), STAMP)[:-1],
    "something behind": encode(Ping(1.0), STAMP) + b"\x00",
    "a number": frame(5),
    "too few parts": frame([VERSION, 1, 1]),
    "too many parts": frame([VERSION, 1, 1, body(Ping(1.0)), 0]),
    "another version": frame([VERSION + 1, 7, 3, body(Ping(1.0))]),
    "a stamp of text": frame([VERSION, "7", 3, body(Ping(1.0))]),
    "no such type": frame([VERSION, 7, 3, {"type": "bomb"}]),
    "an unknown field": frame([VERSION, 7, 3, body(Ping(1.0)) | {"more": 1}]),
    "a missing field": frame([VERSION, 7, 3, {"type": "ping"}]),
    "a negative token": frame([VERSION, 7, 3, body(Stop(RequestId(-1)))]),
    "binary": frame([VERSION, 7, 3, {"type": "ping", "sent": b"1"}]),
    "an extension type": frame([VERSION, 7, 3, {"type": "ping", "sent": msgpack.ExtType(5, b"x")}]),
    "a timestamp": frame([VERSION, 7, 3, {"type": "ping", "sent": msgpack.Timestamp(1)}]),
    "a wide map": frame([VERSION, 7, 3, {str(key): key for key in range(65)}]),
    "not a number": frame([VERSION, 7, 3, {"type": "ping", "sent": "nan"}]),
    "deep nesting": b"\x91" * 5000 + b"\x00",
    "an array that claims to be huge": frame([VERSION, 7, 3])[:-1] + b"\xdd\xff\xff\xff\xff",
    "too large": bytes(MAX_FRAME + 1),
}


@pytest.mark.parametrize("frame", BROKEN.values(), ids=[*BROKEN])
def test_a_broken_frame_is_a_wire_error(frame: bytes):
    with pytest.raises(WireError):
        decode(frame, ToWorker)


def test_another_version_says_what_to_do():
    with pytest.raises(WireError, match="install the same release on both"):
        decode(BROKEN["another version"], ToWorker)


HELLO_BODY, START = body(HELLO), body(Start(RequestId(1), 0, (1,), NodeId(5), Sampling()))
GROW = body(Grow(RequestId(1), 0, (NodeId(1),), (2,), (1.0,), 1, 0.1))
PREFILLED, VERDICT = body(Prefilled(RequestId(1), 0, 1, 0.1)), body(Verdict(RequestId(1), 0, (), 1, 0.1))
VERIFY = body(Verify(RequestId(1), 1, NodeId(7), 6, (6,), (-1,)))
OUT_OF_BOUNDS: dict[str, tuple[Any, Any]] = {
    "more nodes than a tree may have": (VERIFY | {"tokens": [6] * 1025}, ToWorker),
    "a path of too many nodes": (VERDICT | {"path": [1] * 1025}, FromWorker),
    "a probability above one": (GROW | {"probabilities": [1.1]}, FromWorker),
    "a probability that is no number": (GROW | {"probabilities": [float("nan")]}, FromWorker),
    "columns of different length": (GROW | {"tokens": [2, 3]}, FromWorker),
    "more costs than a worker measures": (HELLO_BODY | {"costs": [[width, 0.1] for width in range(1, 66)]}, FromWorker),
    "costs of widths that do not rise": (HELLO_BODY | {"costs": [[5, 0.1], [5, 0.1]]}, FromWorker),
    "a cost of no tokens": (HELLO_BODY | {"costs": [[0, 0.1]]}, FromWorker),
    "a forward that costs nothing": (HELLO_BODY | {"costs": [[1, 0.0]]}, FromWorker),
    "an endless forward": (HELLO_BODY | {"costs": [[1, float("inf")]]}, FromWorker),
    "a cost that is no number": (HELLO_BODY | {"costs": [[1, float("nan")]]}, FromWorker),
    "an endless time": (PREFILLED | {"seconds": float("inf")}, FromWorker),
    "a negative time": (PREFILLED | {"seconds": -0.1}, FromWorker),
    "a token beyond 31 bits": (VERDICT | {"bonus": 1 << 31}, FromWorker),
    "a node beyond 63 bits": (VERDICT | {"path": [1 << 63]}, FromWorker),
    "a round beyond 53 bits": (VERDICT | {"round": 1 << 53}, FromWorker),
    "a prompt of no tokens": (START | {"tokens": []}, ToWorker),
    "no tokens to generate": (body(Submit("r", "x", None, RequestedSampling(), 5)) | {"max_tokens": 0}, FromClient),
    "a text as long as a book": (body(Fault("lost", "", None)) | {"text": "x" * 4097}, FromWorker),
}


@pytest.mark.parametrize(("content", "union"), OUT_OF_BOUNDS.values(), ids=[*OUT_OF_BOUNDS])
def test_a_value_out_of_bounds_is_a_wire_error(content: Any, union: Any):
    with pytest.raises(WireError):
        decode(frame([VERSION, *STAMP, content]), union)


@settings(max_examples=1000)
@given(
    message=st.sampled_from(MESSAGES),
    edits=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=8),
    cut=st.integers(0, 20),
    union=st.sampled_from(UNIONS),
)
def test_a_damaged_frame_is_a_message_or_a_wire_error(message, edits, cut, union):
    damaged = bytearray(encode(message[0], STAMP))
    for place, value in edits:
        damaged[place % len(damaged)] = value
    try:
        stamp, decoded = decode(bytes(damaged[: len(damaged) - cut]), union)
    except WireError:
        return
    assert decode(encode(decoded, stamp), union) == (stamp, decoded)


@given(st.binary(max_size=64))
def test_noise_is_a_wire_error(noise: bytes):
    with pytest.raises(WireError):
        decode(noise, FromWorker)


LOCAL = ["ipc:///tmp/x", "tcp://127.0.0.1:5570", "tcp://localhost:1", "tcp://[::1]:65535"]
_FOREIGN = (
    *("tcp://0.0.0.0:5570", "tcp://192.168.1.4:5570", "tcp://*:5570", "tcp://example.org:80"),
    *("tcp://127.0.0.1.x.org:1", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:x", "tcp://127.0.0.1:*"),
    *("tcp://127.0.0.1:1;tcp://8.8.8.8:1", "ipc://relative", "ipc://@abstract", "inproc://x", "udp://127.0.0.1:1", ""),
    "127.0.0.1:5570",
)
_USE = r"(is not on this machine only, so it needs keys|is not an address): use ipc:///path or tcp://"
REFUSED = [
    *((address, _USE) for address in _FOREIGN),
    *((f"tcp://127.0.0.1:{port}", "has an invalid port") for port in (0, 65536, 99999)),
    *((f"ipc:///{path}", "must have 1 to 100 bytes") for path in ("", "x" * 100, "ä" * 50)),
]


@pytest.mark.parametrize("address", LOCAL)
def test_an_address_on_this_machine_is_accepted(address: str):
    require_local(address)


@pytest.mark.parametrize(("address", "sentence"), REFUSED)
def test_any_other_address_is_refused_with_what_to_use(address: str, sentence: str):
    with pytest.raises(InputError, match=sentence):
        require_local(address)


class Ends:
    """A hub and one link to it."""

    def __init__(self, folder: str) -> None:
        self.context = zmq.Context[Any]()
        self.address = f"ipc://{folder}/hub"
        self.complaints: list[str] = []
        self.hub = Hub(self.context, self.address, FromWorker, lambda _, text: self.complaints.append(text))
        self.link = Link(self.context, self.address, STAMP, ToWorker | FeatureBlock)
        self.link.send(Pong(0.0))
        self.peer = self.arrivals(1)[0].peer

    def arrivals(self, count: int) -> list[Any]:
        found: list[Any] = []
        until(lambda: found.extend(self.hub.receive()) or len(found) >= count)
        return found

    def close(self) -> None:
        self.link.close()
        self.hub.close()
        self.context.destroy(linger=0)


@pytest.fixture
def ends() -> Iterator[Ends]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        ends = Ends(folder)
        yield ends
        ends.close()


def test_messages_arrive_in_order_with_their_stamp(ends: Ends):
    for number in range(5):
        ends.link.send(Pong(float(number)))

    arrivals = ends.arrivals(5)
    assert [arrival.message for arrival in arrivals] == [Pong(float(number)) for number in range(5)]
    assert {(arrival.peer, arrival.stamp) for arrival in arrivals} == {(ends.peer, STAMP)}


def test_broken_frames_are_dropped_counted_and_reported(ends: Ends):
    for broken in (b"noise", encode(Ping(1.0), STAMP)):
        ends.link.socket.send(broken)
    ends.link.socket.send_multipart([encode(Pong(1.0), STAMP), b"more"])
    ends.link.send(Pong(2.0))

    assert [arrival.message for arrival in ends.arrivals(1)] == [Pong(2.0)]
    assert ends.hub.rejected == len(ends.complaints) == 3
    assert ends.complaints[-1] == "A peer sent a message of several frames."


def test_a_frame_that_is_too_large_costs_the_connection_and_not_the_hub(ends: Ends):
    large = ends.context.socket(zmq.DEALER)
    large.connect(ends.address)
    large.send(bytes(MAX_FRAME + 1))
    ends.link.send(Pong(3.0))

    assert [arrival.message for arrival in ends.arrivals(1)] == [Pong(3.0)]
    large.close(linger=0)


@pytest.mark.parametrize("stamp", [Stamp(8, 3), Stamp(7, 2), Stamp(7, 4)])
def test_messages_of_another_incarnation_are_dropped_and_counted(ends: Ends, stamp: Stamp):
    assert ends.hub.send(ends.peer, Ping(1.0), stamp)
    assert ends.hub.send(ends.peer, Ping(2.0), STAMP)

    assert until(lambda: ends.link.receive(1.0)) == [Ping(2.0)]
    assert (ends.link.stale, ends.link.rejected) == (1, 0)


def test_a_link_drops_and_counts_what_breaks_the_protocol(ends: Ends):
    """Also a block without bytes, and bytes without a block."""
    block = encode(FeatureBlock(RequestId(1), 0, 0, 1, FeatureForm((1,), 2), 1, 0), STAMP)
    bad = [
        [b"noise"],
        [encode(Pong(1.0), STAMP)],
        [block],
        [encode(Ping(1.0), STAMP), b"more"],
        [block, b"more", b"more"],
    ]
    for frames in bad:
        ends.hub.socket.send_multipart([ends.peer, *frames])
    assert ends.hub.send(ends.peer, Ping(3.0), STAMP)

    assert until(lambda: ends.link.receive(1.0)) == [Ping(3.0)]
    assert ends.link.rejected == len(bad)


def test_features_arrive_with_their_bytes_in_order(ends: Ends):
    form = FeatureForm((1,), 2)
    (shipment,) = shipments(RequestId(1), 0, 5, form, ElementType.FLOAT32, np.ones((3, 2), np.float32))
    assert ends.hub.send(ends.peer, shipment.block, Stamp(8, 3), shipment.payload)
    assert ends.hub.send(ends.peer, shipment.block, STAMP, shipment.payload)
    assert ends.hub.send(ends.peer, Ping(1.0), STAMP)

    arrived: list[Any] = []
    until(lambda: arrived.extend(ends.link.receive(1.0)) or len(arrived) == 2)
    assert arrived == [shipment, Ping(1.0)]
    assert (ends.link.stale, ends.link.rejected) == (1, 0)


def test_nothing_is_sent_to_an_unknown_peer(ends: Ends):
    (shipment,) = shipments(RequestId(1), 0, 5, FeatureForm((1,), 2), ElementType.FLOAT32, np.ones((3, 2), np.float32))

    assert not ends.hub.send(b"nobody", shipment.block, STAMP, shipment.payload)
    assert not ends.hub.send(b"nobody", Ping(1.0), STAMP)
    assert ends.hub.queue_full == 0


def test_one_receive_handles_a_bounded_number_of_frames(ends: Ends):
    for _ in range(2000):
        ends.link.send(Pong(1.0))
    ends.arrivals(1)

    assert len(list(ends.hub.receive())) <= 256
    assert len(ends.arrivals(1000)) >= 1000


def test_one_receive_takes_a_bounded_time(ends: Ends):
    """The caller's work between two messages counts: a flood of expensive ones must not keep it from its timers."""
    now = 0.0
    with tempfile.TemporaryDirectory() as folder:
        hub = Hub(ends.context, f"ipc://{folder}/slow", FromWorker, clock=lambda: now)
        link = Link(ends.context, f"ipc://{folder}/slow", STAMP, ToWorker)
        for _ in range(40):
            link.send(Pong(1.0))
        turns: list[int] = []
        while sum(turns) < 40:
            assert hub.socket.poll(5_000)
            turns.append(0)
            for _ in hub.receive():
                turns[-1] += 1
                now += 0.002
        link.close()
        hub.close()

    assert max(turns) == 3


def test_an_address_in_use_is_refused_and_left_alone(ends: Ends):
    with pytest.raises(InputError, match=r"Another pipeline listens on .*: choose another address"):
        Hub(ends.context, ends.address, FromWorker)

    ends.link.send(Pong(4.0))
    assert [arrival.message for arrival in ends.arrivals(1)] == [Pong(4.0)]


def test_a_port_that_a_program_has_bound_and_does_not_listen_at_is_refused():
    with socket.socket() as occupant, zmq.Context[Any]() as context:
        occupant.bind(("127.0.0.1", 0))
        with pytest.raises(InputError, match=r"Cannot listen on .* \(Address already in use\): choose another address"):
            Hub(context, f"tcp://127.0.0.1:{occupant.getsockname()[1]}", FromWorker)


def test_a_file_at_the_address_is_refused_and_kept(tmp_path: Path):
    file = Path(tempfile.mkstemp(dir="/tmp")[1])
    file.write_text("precious")
    with zmq.Context[Any]() as context, pytest.raises(InputError, match="exists and is not a socket"):
        Hub(context, f"ipc://{file}", FromWorker)

    assert file.read_text() == "precious"
    file.unlink()


def test_a_dead_pipelines_socket_file_is_taken_over_and_removed_at_the_end():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, zmq.Context[Any]() as context:
        file = Path(folder) / "hub"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(file))
        Hub(context, f"ipc://{file}", FromWorker).close()

        assert not file.exists()


def test_sockets_have_limits_and_a_tcp_hub_queues_few_frames():
    limits = {zmq.MAXMSGSIZE: MAX_FRAME, zmq.LINGER: 0, zmq.SNDHWM: 10_000, zmq.RCVHWM: 10_000}
    with zmq.Context[Any]() as context, connected_dealer(context, "ipc:///tmp/nobody") as dealer:
        assert {option: dealer.getsockopt(option) for option in limits} == limits
        hub = Hub(context, "tcp://127.0.0.1:0", FromClient)
        assert hub.socket.getsockopt(zmq.RCVHWM) == 64
        hub.close()
