"""Laws of `bench servers`: what a client sees of servers that run already."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator.cli.app import cli
from protocol.errors import InputError

KEY = "a-key"


class _Handler(BaseHTTPRequestHandler):
    """Streams five pieces of text and the usage; knows which prompts it has seen."""

    seen: list[dict[str, Any]]

    def do_POST(self) -> None:
        if self.headers.get("authorization") != f"Bearer {KEY}":
            self.send_error(401, "a key is needed")
            return
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        cached = 7 if body in self.seen else 0
        self.seen.append(body)
        self.send_response(200)
        self.end_headers()
        chunks: list[Any] = [{"choices": [{"text": "a"}]} for _ in range(5)]
        details = {"cached_tokens": cached}
        chunks.append({"choices": [], "usage": {"prompt_tokens": 11, "prompt_tokens_details": details}})
        for chunk in chunks:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    _Handler.seen = []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def measured(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["bench", "servers", *arguments, "--json"], catch_exceptions=False)
    return json.loads(result.stdout)


def test_every_server_gets_every_prompt_twice_in_turns(server: str):
    other = server.replace("127.0.0.1", "localhost")

    trials = measured(f"{server}#{KEY}", f"{other}#{KEY}", "--lengths", "20,40", "--repeats", "2", "--model", "m")[
        "trials"
    ]

    prompts = [body["prompt"] for body in _Handler.seen]
    assert all(len({*prompts[at : at + 4]}) == 1 for at in range(0, 16, 4))
    assert len(set(prompts)) == 4
    assert {len(prompt) for prompt in prompts} == {80, 160}
    assert {body["model"] for body in _Handler.seen} == {"m"}
    assert len(trials) == 8


def test_first_text_speed_and_reused_tokens_are_measured(server: str):
    (trial,) = measured(f"{server}#{KEY}", "--lengths", "20", "--repeats", "1")["trials"]

    assert (trial["new"]["prompt_tokens"], trial["new"]["cached_tokens"], trial["again"]["cached_tokens"]) == (11, 0, 7)
    assert trial["new"]["first"] > 0
    assert trial["new"]["speed"] > 0


def test_no_measurement_names_a_key(server: str):
    result = CliRunner().invoke(cli, ["bench", "servers", f"{server}#{KEY}", "--lengths", "20", "--repeats", "1"])

    assert server in result.stdout
    assert KEY not in result.output


def test_a_server_that_refuses_or_is_not_there_is_named(server: str):
    for address in (server, "http://127.0.0.1:9"):
        result = CliRunner().invoke(cli, ["bench", "servers", address, "--lengths", "20"])

        assert isinstance(result.exception, InputError)
        assert address in str(result.exception)


@pytest.mark.parametrize("lengths", ["0", "a", ""])
def test_lengths_are_numbers_above_zero(lengths: str):
    assert CliRunner().invoke(cli, ["bench", "servers", "http://127.0.0.1:9", "--lengths", lengths]).exit_code == 2
