"""Ranks connect, run the commands of rank 0, and notice a lost rank. Sockets, but no processes."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue

import mlx.core as mx
import msgspec
import pytest

from protocol.contracts.target_hosts import TargetHosts
from protocol.errors import InputError, WireError
from protocol.inference.joint_forward import ForwardPart
from protocol.messages.features import FINAL
from target_worker.tensor_parallel import ranks, rendezvous
from target_worker.tensor_parallel.rank_commands import (
    CloseCommand,
    EvaluateCommand,
    EvaluateTogetherCommand,
    KeepCommand,
    PrefillCommand,
    RankCommand,
    RecordCommand,
    TruncateCommand,
    encoded,
    received,
)
from target_worker.tensor_parallel.ranks import LeadingModel, follow, start_heartbeat
from target_worker.tensor_parallel.rendezvous import Challenge, Peer, answer, fresh_nonce, join, meet
from tests.support.models.tiny_models import network, tree_model


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture
def hosts() -> TargetHosts:
    return TargetHosts(tuple((f"127.0.0.1:{port}",) for port in free_ports(3)), silence=30.0)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


KEY = b"k" * 32


def _no_check() -> None:
    pass


# Commands ------------------------------------------------------------------------------------


def test_commands_arrive_as_they_were_sent_and_end_with_the_sender(pair: tuple[socket.socket, socket.socket]):
    here, there = pair
    commands: list[RankCommand] = [
        PrefillCommand(1, tuple(range(5000))),
        EvaluateCommand(1, (7, 8), (-1, 40)),
        EvaluateTogetherCommand((EvaluateCommand(1, (7,), (-1,)), EvaluateCommand(2, (8, 9), (-1, 3)))),
        KeepCommand(1, (40,)),
        TruncateCommand(2, 0),
        RecordCommand((-1, 3)),
        CloseCommand(1),
    ]
    for command in commands:
        here.sendall(encoded(command))
    here.close()

    assert [received(there) for _ in commands] == commands
    with pytest.raises(EOFError):
        received(there)


@pytest.mark.parametrize("frame", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x02\xc1\xc1", b"\x00\x00\x00\x01\x07"])
def test_bytes_that_are_no_command_are_refused(frame: bytes, pair: tuple[socket.socket, socket.socket]):
    pair[0].sendall(frame)

    with pytest.raises(WireError):
        received(pair[1])


def test_a_rank_that_runs_the_commands_holds_the_kv_of_rank_0(pair: tuple[socket.socket, socket.socket]):
    leader = LeadingModel(network())
    leader.lead([Peer(1, pair[0], pair[0])])
    sequence = leader.sequence()
    sequence.prefill((3, 1, 4, 1, 5, 9, 2, 6))
    first = sequence.next_row
    sequence.evaluate((5, 3, 5), (-1, first, first))
    sequence.keep((first, first + 2), ())
    sequence.truncate(9)
    expected = sequence.evaluate((8, 9), (-1, first + 3))
    released = leader.sequence()
    released.prefill((1, 2))
    del released, sequence
    pair[0].close()

    commands = list(_received_commands(pair[1]))
    follower = tree_model()
    seen: list[mx.array] = []
    evaluate = type(follower.sequence()).evaluate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "protocol.inference.tree_sequence.TreeSequence.evaluate",
            lambda self, tokens, parents: seen.append(evaluate(self, tokens, parents)) or seen[-1],
        )
        follow(follower, commands)

    assert mx.array_equal(seen[-1], expected).item()
    assert commands[-2:] == [CloseCommand(2), CloseCommand(1)]


def test_all_ranks_evaluate_several_sequences_in_one_forward(pair: tuple[socket.socket, socket.socket]):
    leader = LeadingModel(network())
    leader.lead([Peer(1, pair[0], pair[0])])
    one, other = leader.sequence(), leader.sequence()
    one.prefill((3, 1, 4))
    other.prefill((1, 5, 9, 2))
    expected = leader.evaluate_together([ForwardPart(one, (6, 5), (-1, 0)), ForwardPart(other, (3, 5, 8), (-1, 0, 0))])
    del one, other
    pair[0].close()

    commands = list(_received_commands(pair[1]))
    follower = tree_model()
    seen: list[mx.array] = []
    together = follower.evaluate_together
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follower, "evaluate_together", lambda parts: seen.extend(together(parts)) or seen)
        follow(follower, commands)

    assert [type(command) for command in commands] == [
        PrefillCommand,
        PrefillCommand,
        EvaluateTogetherCommand,
        CloseCommand,
        CloseCommand,
    ]
    assert [mx.array_equal(*logits).item() for logits in zip(seen, expected, strict=True)] == [True, True]


def test_all_ranks_record_what_rank_0_records(pair: tuple[socket.socket, socket.socket]):
    """All of them evaluate the same arrays, so none waits for a sum that another one leaves out."""
    leader = LeadingModel(network())
    leader.lead([Peer(1, pair[0], pair[0])])
    leader.record((FINAL, 1))
    sequence = leader.sequence()
    sequence.prefill((3, 1, 4))
    recorded = sequence.recorded
    del sequence
    pair[0].close()

    commands = list(_received_commands(pair[1]))
    follower = tree_model()
    follow(follower, commands)

    assert commands == [RecordCommand((FINAL, 1)), PrefillCommand(1, (3, 1, 4)), CloseCommand(1)]
    again = follower.sequence()
    again.prefill((3, 1, 4))
    assert again.recorded is not None
    assert recorded is not None
    assert mx.array_equal(again.recorded.rows, recorded.rows).item()


# Rendezvous -----------------------------------------------------------------------------------


def test_the_ranks_connect_in_any_order_and_a_rank_may_connect_again(hosts: TargetHosts):
    with ThreadPoolExecutor() as pool:
        second = pool.submit(join, hosts, KEY, 2, "model")
        leader = pool.submit(meet, hosts, KEY, "model", _no_check)
        first_try = _proven(hosts, 1)
        assert _line(first_try) == b"wait\n"
        first_try.close()
        stranger = _dial(hosts)
        stranger.sendall(b"GET / HTTP/1.1\r\n")
        first = pool.submit(join, hosts, KEY, 1, "model")
        peers = leader.result(60)
        others = [first.result(60), second.result(60)]

    assert [peer.rank for peer in peers] == [1, 2]
    for peer, other in zip(peers, others, strict=True):
        peer.commands.sendall(b"c")
        other.heartbeat.sendall(b"p")
        assert (other.commands.recv(10), peer.heartbeat.recv(10)) == (b"c", b"p")
    stranger.close()
    for one in (*peers, *others):
        one.commands.close()
        one.heartbeat.close()


def test_a_rank_with_another_model_is_refused_on_both_sides(hosts: TargetHosts):
    two = TargetHosts(hosts.addresses[:2], silence=30.0)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(join, two, KEY, 1, "fine-tuned")
        with pytest.raises(
            InputError, match="Rank 1 has another target model or other --kv-bits than rank 0: give every host"
        ):
            meet(two, KEY, "model", _no_check)
        with pytest.raises(
            (InputError, ConnectionError), match=r"Rank 1 has another target model|Rank 0 has ended|reset"
        ):
            other.result(60)


def test_rank_0_names_the_missing_ranks(hosts: TargetHosts, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendezvous, "_MEETING_SECONDS", 0.2)

    with pytest.raises(InputError, match=rf"rank 1 \({hosts.addresses[1][0]}\), rank 2 .*target-rank .*--rank 1"):
        meet(hosts, KEY, "model", _no_check)


def test_an_address_in_use_is_named(hosts: TargetHosts):
    port = int(hosts.addresses[0][0].rpartition(":")[2])
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(InputError, match=f"can't listen at 127.0.0.1:{port}"),
    ):
        meet(hosts, KEY, "model", _no_check)


# Keys -----------------------------------------------------------------------------------------


@pytest.fixture
def leader(hosts: TargetHosts) -> Iterator[Future[list[Peer]]]:
    """Rank 0, which waits until the test ends."""
    ended = threading.Event()

    def check() -> None:
        if ended.is_set():
            raise InputError("The test has ended.")

    with ThreadPoolExecutor() as pool:
        yield pool.submit(meet, hosts, KEY, "model", check)
        ended.set()


def test_a_rank_with_another_key_ends_with_a_sentence(
    hosts: TargetHosts, leader: Future[list[Peer]], capfd: pytest.CaptureFixture[str]
):
    for _ in range(2):
        with pytest.raises(InputError, match=r"does not have the ranks' key: give every host the same hosts file"):
            join(hosts, b"K" * 32, 1, "model")

    told = capfd.readouterr().err
    while not told:
        told = capfd.readouterr().err
    assert told == "A program at 127.0.0.1 that calls itself rank 1 did not prove that it has the key.\n"
    assert not leader.done()


def test_a_rank_sends_no_proof_to_a_rank_0_without_the_key(hosts: TargetHosts):
    port = int(hosts.addresses[0][0].rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)) as listener, ThreadPoolExecutor() as pool:
        rank = pool.submit(join, hosts, KEY, 1, "model")
        connection, _ = listener.accept()
        greeting = _line(connection)
        forged = Challenge.fresh(b"K" * 32, greeting)
        connection.sendall(msgspec.json.encode(forged) + b"\n")

        assert _line(connection) == b""
        with pytest.raises(InputError, match="does not have the ranks' key"):
            rank.result(60)
        connection.close()


def test_neither_a_recorded_nor_a_reflected_proof_admits_a_rank(hosts: TargetHosts, leader: Future[list[Peer]]):
    greeting = _greeting(1)
    recorded, challenge = _greeted(hosts, greeting)
    proof = answer(KEY, greeting, challenge)
    recorded.close()

    replayed, _ = _greeted(hosts, greeting)
    replayed.sendall(proof + b"\n")
    reflected, challenge = _greeted(hosts, greeting)
    reflected.sendall(challenge.proof.encode() + b"\n")

    assert [_line(replayed), _line(reflected)] == [b"", b""]
    assert not leader.done()
    replayed.close()
    reflected.close()


def test_silent_strangers_hold_no_rank_up(hosts: TargetHosts, leader: Future[list[Peer]]):
    strangers = [_dial(hosts) for _ in range(20)]
    rank = _proven(hosts, 1)

    assert _line(rank) == b"wait\n"
    for connection in (rank, *strangers):
        connection.close()


# Heartbeats -----------------------------------------------------------------------------------


def test_a_rank_that_ends_is_noticed_at_once(pair: tuple[socket.socket, socket.socket]):
    heard: SimpleQueue[str] = SimpleQueue()
    start_heartbeat(pair[0], 600.0, heard.put)
    pair[1].close()

    assert heard.get(timeout=30) == "has ended"


def test_a_silent_rank_is_noticed_although_its_connection_is_open(pair: tuple[socket.socket, socket.socket]):
    heard: SimpleQueue[str] = SimpleQueue()
    start_heartbeat(pair[0], 0.2, heard.put)

    assert heard.get(timeout=30) == "gave no sign of life for 0.2 s"


@pytest.mark.thorough
def test_two_ranks_keep_each_other_alive(pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks, "_HEARTBEAT_SECONDS", 0.05)
    lost = threading.Event()
    for end in pair:
        start_heartbeat(end, 1.5, lambda _: lost.set())

    assert not lost.wait(2.0)


def _received_commands(connection: socket.socket) -> Iterator[RankCommand]:
    """All commands until the other end closes."""
    with suppress(EOFError):
        while True:
            yield received(connection)


def _dial(hosts: TargetHosts) -> socket.socket:
    address = ("127.0.0.1", int(hosts.addresses[0][0].rpartition(":")[2]))
    while True:
        try:
            return socket.create_connection(address, timeout=30)
        except OSError:
            threading.Event().wait(0.01)


def _line(connection: socket.socket) -> bytes:
    """With its end; what there was before the other side closed."""
    line = b""
    with suppress(ConnectionError):
        while not line.endswith(b"\n") and (part := connection.recv(1)):
            line += part
    return line


def _greeted(hosts: TargetHosts, greeting: bytes) -> tuple[socket.socket, Challenge]:
    connection = _dial(hosts)
    connection.sendall(greeting)
    return connection, msgspec.json.decode(_line(connection), type=Challenge)


def _proven(hosts: TargetHosts, rank: int) -> socket.socket:
    """Rank 0's connection to a rank that has the key."""
    greeting = _greeting(rank)
    connection, challenge = _greeted(hosts, greeting)
    connection.sendall(answer(KEY, greeting, challenge) + b"\n")
    return connection


def _greeting(rank: int) -> bytes:
    fields = {"version": 3, "rank": rank, "ranks": 3, "model": "model", "use": "commands", "nonce": fresh_nonce()}
    return json.dumps(fields).encode() + b"\n"
