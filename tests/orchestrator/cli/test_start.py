"""Laws of pipelines that keep running: their ports are named before they are taken, and lists have clean values."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from orchestrator.cli.app import cli
from orchestrator.cli.commands import start
from protocol.errors import InputError
from protocol.messages.remote import WorkerEntry


class Started(Exception):
    """Models would be loaded now."""


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise Started

    monkeypatch.setattr(start, "started", refuse)


@pytest.fixture
def used() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def serve_workers(*words: str) -> Result:
    return CliRunner().invoke(cli, ["serve-workers", *words])


def test_both_ports_are_named_before_models_are_loaded():
    result = serve_workers("--listen", "127.0.0.1:0", "--address", "tcp://127.0.0.1:0")

    assert isinstance(result.exception, Started)
    assert "127.0.0.1:0 (--listen)" in result.stderr
    assert "tcp://127.0.0.1:0 (--address)" in result.stderr


@pytest.mark.parametrize("option", ["--listen", "--address"])
def test_a_port_in_use_is_refused_with_the_option_that_chooses_it(option: str, used: int):
    places = {"--listen": "127.0.0.1:0", "--address": "tcp://127.0.0.1:0"}
    places[option] = places[option].removesuffix("0") + str(used)
    result = serve_workers(*(word for each in places.items() for word in each))

    assert isinstance(result.exception, InputError)
    assert f"port {used}: choose another port with {option}" in str(result.exception)


def test_one_port_for_both_is_refused(used: int):
    result = serve_workers("--listen", "127.0.0.1:1", "--address", "tcp://127.0.0.1:1")

    assert isinstance(result.exception, InputError)
    assert "name the same port 1: choose two" in str(result.exception)


@pytest.mark.parametrize(("given", "shown"), [("Device(cpu, 0)", "processor"), ("gpu (Apple M4)", "GPU (Apple M4)")])
def test_a_list_of_workers_names_devices_in_words(given: str, shown: str, monkeypatch: pytest.MonkeyPatch):
    entry = WorkerEntry(name="local", role="target", device=given, status="ready")
    monkeypatch.setattr(start, "listening_pipelines", lambda: {7: None})
    monkeypatch.setattr(start.Owner, "workers", lambda _: [entry])
    monkeypatch.setattr(start.Owner, "__init__", lambda *_: None)

    rows = json.loads(CliRunner().invoke(cli, ["workers", "list", "--json"]).stdout)

    assert [(row["device"], row["pipeline"]) for row in rows] == [(shown, 7)]
