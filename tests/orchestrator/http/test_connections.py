"""Laws of connections: a client that sends or reads slowly holds nothing for long."""

import asyncio
import json
import socket
import time

import pytest

from orchestrator.http.settings import ConnectionLimits
from tests.support.asked_server import CHAT, HELLO, KEY
from tests.support.fake_pipeline import FakePipeline
from tests.support.http_server import closed, listening, request, status
from tests.support.processes import until

SHORT = ConnectionLimits(body_seconds=0.3, rest_seconds=0.3, write_seconds=0.3)
SHORT_HEADS = ConnectionLimits(head_seconds=0.5)
BODY = json.dumps(HELLO).encode()
STREAM = json.dumps({**HELLO, "stream": True}).encode()
HEALTH = request("GET", "/health", key=None)
ASKED = request("POST", CHAT, body=BODY)
MODELS = request("GET", "/v1/models")
SECONDS = 20.0


def dripped(client: socket.socket, drop: bytes) -> bool:
    """Sends `drop` again and again until the server closes the connection."""
    client.settimeout(0.05)
    for _ in range(400):
        try:
            if not client.recv(1 << 16):
                return True
        except TimeoutError:
            pass
        except ConnectionError:
            return True
        try:
            client.sendall(drop)
        except ConnectionError:
            return True
    return False


# What arrives slowly -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "begun", [b"", b"GET /health HTTP/1.1\r\nx: ", MODELS], ids=["none", "half", "after an answer"]
)
def test_a_head_that_does_not_end_ends_its_connection(begun: bytes):
    with listening(limits=SHORT_HEADS) as server, server.client(begun) as client:
        assert begun != MODELS or status(client) == 200
        assert dripped(client, b"x") if begun else closed(client)


@pytest.mark.parametrize(
    ("path", "key", "answer"), [(CHAT, KEY, 408), (CHAT, "wrong", 401), ("/health", None, 405), ("/none", KEY, 404)]
)
def test_a_body_that_does_not_end_is_answered_and_ends_its_connection(path: str, key: str | None, answer: int):
    """Also one that nobody reads."""
    whole = request("POST", path, body=BODY + b" " * 10_000, key=key)

    with listening(limits=SHORT) as server, server.client(whole[:-9_000]) as client:
        assert status(client) == answer
        assert dripped(client, b" ")


def test_a_body_that_came_after_its_answer_leaves_the_connection_open():
    whole = request("POST", CHAT, body=BODY, key="wrong")

    with listening() as server, server.client(whole[:-10]) as client:
        assert status(client) == 401
        client.sendall(whole[-10:] + HEALTH)
        rest = b""
        while b'"status"' not in rest:
            rest += client.recv(1 << 16)


# Who ends its sending ----------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [HEALTH, ASKED[:-3], ASKED], ids=["idle", "incomplete", "asked"])
def test_a_connection_and_its_generation_end_with_the_client_s_sending(sent: bytes):
    pipeline = FakePipeline(lambda _: ["a", None])

    with listening(pipeline) as server, server.client(sent) as client:
        assert sent != HEALTH or status(client) == 200
        until(lambda: pipeline.running == (sent == ASKED), SECONDS)
        client.shutdown(socket.SHUT_WR)
        assert closed(client)
        until(lambda: pipeline.running == 0, SECONDS)


# What is read slowly -----------------------------------------------------------------------------


def test_places_are_free_when_generation_has_ended_whether_clients_read_or_not():
    pipeline = FakePipeline(lambda _: ["word " * 200_000] * 16)

    with (
        listening(pipeline, most_open=1) as server,
        server.client(request("POST", CHAT, body=STREAM), receive_buffer=4096),
    ):
        until(lambda: len(pipeline.asked) == 1 and pipeline.running == 0, SECONDS)
        pipeline.pieces = lambda _: ["Hello"]
        with server.client(request("POST", CHAT, body=BODY)) as other:
            assert status(other) == 200


@pytest.mark.parametrize("body", [BODY, STREAM])
def test_a_client_that_reads_nothing_ends_its_connection(body: bytes):
    pipeline = FakePipeline(lambda _: ["word " * 200_000] * 16)

    with (
        listening(pipeline, limits=SHORT) as server,
        server.client(request("POST", CHAT, body=body), receive_buffer=4096),
    ):
        until(lambda: len(pipeline.asked) == 1 and pipeline.running == 0, SECONDS)
        until(lambda: server.connections == 0, SECONDS)
        assert pipeline.running == 0


def test_a_client_that_stops_reading_frees_its_place_while_its_text_goes_on():
    pipeline = FakePipeline(lambda _: [*["word"] * 2000, None])

    with (
        listening(pipeline, limits=SHORT, most_open=1) as server,
        server.client(request("POST", CHAT, body=STREAM), receive_buffer=4096),
    ):
        until(lambda: pipeline.stuck.is_set(), SECONDS)
        until(lambda: pipeline.running == 0, SECONDS)
        pipeline.pieces = lambda _: ["Hello"]
        with server.client(request("POST", CHAT, body=BODY)) as other:
            assert status(other) == 200


def test_a_client_that_reads_slowly_is_waited_for_until_it_stops(monkeypatch: pytest.MonkeyPatch):
    """The test says how time passes for the server. Buffers of the system hold less than is read at once."""
    pipeline, ahead = FakePipeline(lambda _: ["word " * 200_000] * 16), [0.0]
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda _: time.monotonic() + ahead[0])

    with (
        listening(pipeline, limits=ConnectionLimits(write_seconds=1000.0)) as server,
        server.client(request("POST", CHAT, body=STREAM), receive_buffer=4096) as client,
    ):
        until(lambda: pipeline.running == 0 and pipeline.asked, SECONDS)
        for _ in range(6):
            read = 0
            while read < 1_000_000:
                read += len(part := client.recv(1 << 16))
                assert part
            ahead[0] += 600.0
        assert server.connections == 1
        while server.connections:
            ahead[0] += 1000.0
            time.sleep(0.1)


# What a stranger can do to others ----------------------------------------------------------------


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
def test_a_request_of_ambiguous_length_is_refused_and_its_rest_is_no_request(version: bytes):
    """HTTP/1.0 has no Transfer-Encoding, so a proxy of that version may take the body's first chunk for a request."""
    hidden = request("GET", "/v1/models")
    body = b"0\r\n\r\n" + hidden
    lengths = ("transfer-encoding: chunked", *([f"content-length: {len(body)}"] if version == b"HTTP/1.1" else []))
    head = request("POST", CHAT, "content-type: application/json", "connection: keep-alive", *lengths)
    head = head.replace(b"HTTP/1.1", version)

    with listening() as server, server.client(head + body) as client:
        assert status(client) == 400
        said = client.recv(1 << 16)
        assert b"ambiguous_length" in said
        assert closed(client)


CHUNKED = request("POST", CHAT, "content-type: application/json", "transfer-encoding: chunked", key="wrong")


@pytest.mark.parametrize(
    ("sent", "answer", "later"),
    [(b"nonsense\r\n\r\n", 400, b""), (CHUNKED + b"ZZZ\r\n", 400, b""), (CHUNKED, 401, b"ZZZ\r\n")],
    ids=["head", "body", "body behind its answer"],
)
def test_what_is_no_http_ends_the_connection_and_strangers_can_not_fill_the_log(
    sent: bytes, answer: int, later: bytes, capfd: pytest.CaptureFixture[str]
):
    with listening() as server, server.client(sent) as client:
        assert status(client) == answer
        client.sendall(later)
        assert closed(client)

    assert capfd.readouterr().err == ""
