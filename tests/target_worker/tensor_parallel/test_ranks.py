"""Ranks connect, run the commands of rank 0, and notice a lost rank. Sockets, but no processes."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import mlx.core as mx
import msgspec
import pytest

from protocol.contracts.target_hosts import TargetHosts
from protocol.errors import InputError, WireError
from protocol.inference.language_model import LanguageModel
from protocol.worker.process import WorkerSetup
from target_worker import assembly
from target_worker.engine import TargetEngine, TargetModel
from target_worker.tensor_parallel import ranks, rendezvous
from target_worker.tensor_parallel.ranks import GroupDivision, RankCommand, encoded, received, start_heartbeat
from target_worker.tensor_parallel.rendezvous import Challenge, Peer, answer, fresh_nonce, join, meet
from tests.support.models.tiny_models import network
from tests.support.paths import DEMO_TARGET, ROOT
from tests.support.processes import free_ports


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
    part = RankCommand("evaluate", 1, ((7, 8), (-1, 40)))
    commands = [
        RankCommand("prefill", 1, (tuple(range(5000)),)),
        part,
        RankCommand("evaluate_together", parts=(part, RankCommand("evaluate", 2, ((8, 9), (-1, 3))))),
        RankCommand("keep", 1, ((40,), ())),
        RankCommand("truncate", 2, (0,)),
        RankCommand("record", arguments=((-1, 3),)),
        RankCommand("close", 1),
    ]
    for command in commands:
        here.sendall(encoded(command))
    here.close()

    assert [received(there) for _ in commands] == commands
    with pytest.raises(EOFError):
        received(there)


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x02\xc1\xc1",
        b"\x00\x00\x00\x01\x07",
        b"\x00\x00\x00\x08\x92\xa5_tail\x01",
    ],
)
def test_bytes_that_are_no_command_are_refused(frame: bytes, pair: tuple[socket.socket, socket.socket]):
    pair[0].sendall(frame)

    with pytest.raises(WireError):
        received(pair[1])


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


@pytest.mark.parametrize(
    ("patience", "ends", "reason"), [(600.0, True, "has ended"), (0.2, False, "gave no sign of life for 0.2 s")]
)
def test_a_rank_is_lost_when_it_ends_or_is_silent(
    pair: tuple[socket.socket, socket.socket], patience: float, ends: bool, reason: str
):
    heard: SimpleQueue[str] = SimpleQueue()
    start_heartbeat(pair[0], patience, heard.put)
    if ends:
        pair[1].close()

    assert heard.get(timeout=30) == reason


@pytest.mark.thorough
def test_two_ranks_keep_each_other_alive(pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks, "_HEARTBEAT_SECONDS", 0.05)
    lost = threading.Event()
    for end in pair:
        start_heartbeat(end, 1.5, lambda _: lost.set())

    assert not lost.wait(2.0)


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


_LATE = 1.0
"""Seconds that rank 1 takes longer to load."""


@pytest.mark.thorough
def test_ranks_meet_on_the_processor_after_all_have_loaded_and_before_any_forward(tmp_path: Path):
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.loading_rank", str(hosts), str(rank), str(DEMO_TARGET), str(seconds)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        for rank, seconds in enumerate((0.0, _LATE))
    ]
    try:
        quick, late = (json.loads(process.communicate(timeout=60)[0]) for process in processes)
    finally:
        for process in processes:
            process.kill()

    assert late["loaded"] > quick["loaded"]
    for rank in (quick, late):
        (_, met, on_processor), *forwards = rank["sums"]
        assert on_processor
        assert met >= late["loaded"]
        assert forwards
        assert all(began >= met for began, _, _ in forwards)


class Alone:
    """A division of nothing, whose peer is lost while it loads."""

    def divide(self, network: Any) -> None:
        pass

    def await_loaded(self) -> None:
        raise RuntimeError("[ring] recv failed")


def test_a_rank_that_is_lost_while_others_load_is_no_fault_of_the_model():
    with pytest.raises(RuntimeError, match="recv"):
        LanguageModel.load(DEMO_TARGET, Alone())


def test_scales_that_mlx_lm_would_leave_out_are_not_divided():
    divided = network()
    divided.layers[0].mlp.down_proj.global_scale = mx.ones(())

    with pytest.raises(InputError, match="can't divide a model of type llama"):
        GroupDivision(cast("Any", None)).divide(divided)


@pytest.mark.parametrize(("asked", "chunk"), [(512, 128), (32, 32)])
def test_a_divided_target_prefills_in_smaller_chunks_and_its_ranks_share_the_gpu(
    asked: int, chunk: int, monkeypatch: pytest.MonkeyPatch
):
    chunks: list[int] = []
    shares: list[float] = []

    class Engine(TargetEngine):
        def __init__(self, model: TargetModel, prefill_chunk: int = 0, *others: Any) -> None:
            chunks.append(prefill_chunk)
            super().__init__(model, prefill_chunk, *others)

    monkeypatch.setattr(assembly, "TargetEngine", Engine)
    monkeypatch.setattr(assembly, "load_leading_model", lambda folder, *_: LanguageModel.load(folder))
    monkeypatch.setattr(assembly, "wire", lambda share, _: shares.append(share))
    hosts = TargetHosts((("127.0.0.1:1",), ("127.0.0.1:2",)))
    setup = WorkerSetup(address="", epoch=1, incarnation=1, engine="mlx", model=str(DEMO_TARGET), prefill_chunk=asked)
    setup = msgspec.structs.replace(setup, gpu_share=0.8)

    assembly.build(msgspec.structs.replace(setup, hosts=hosts))
    assembly.build(setup)

    assert chunks == [chunk, asked]
    assert shares == [0.4, 0.8], "ranks on one machine divide the target's share of its GPU"
