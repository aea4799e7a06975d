"""Workers of other machines, played by processes with keys of their own over loopback TCP: they come and go, and no
request notices. Real processes, real keys."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator import Pipeline, SamplingParams
from orchestrator.cli.app import cli
from protocol.errors import InputError
from protocol.messages.remote import WorkerEntry
from protocol.messages.worker import Prefilled
from tests.conftest import Reference
from tests.end_to_end.test_kv_pipeline import arenas
from tests.support.processes import generate_while, of_worker, running, until

PROMPT = "def quicksort(items):"
PARAMS = SamplingParams(max_tokens=160)
LONG = SamplingParams(max_tokens=400)


class Machine:
    """Another machine: a folder for its keys, and `launch-pipeline attach` in it."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self._words = (home / "words").open("a+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.cli.app", "attach", *arguments],
            env={**os.environ, "XDG_CONFIG_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=self._words,
            stderr=self._words,
        )

    @property
    def words(self) -> str:
        self._words.seek(0)
        return self._words.read()

    def worker(self) -> int:
        """Process id of the worker that it lends, once there is one."""

        def found() -> int:
            own = (pid for pid, parent, command in running() if parent == self.process.pid and "_worker" in command)
            return next(own, 0)

        return until(found)

    def ended(self, seconds: float = 20.0) -> int:
        return self.process.wait(seconds)

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.said = self.words
        self._words.close()


@contextmanager
def machine(home: Path, *arguments: str) -> Iterator[Machine]:
    home.mkdir(exist_ok=True)
    lent = Machine(home, *arguments)
    try:
        yield lent
    finally:
        lent.close()


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machines")


@pytest.fixture(scope="module")
def server(homes: Path) -> Iterator[Pipeline]:
    """A pipeline without guesses of its own. At its pace an answer is under way for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(homes / "server"))
        options: dict[str, Any] = {"lookup": "off", "pace": "m4-16gb-qwen2.5-3b"}
        with Pipeline(listen="127.0.0.1:0", draft_engine="none", **options) as pipeline:
            yield pipeline


@pytest.fixture(scope="module")
def guest(server: Pipeline, homes: Path) -> Iterator[Callable[..., Machine]]:
    """Attaches a quick draft from a machine that joins at the first call."""
    opened: list[Machine] = []

    def attach(*arguments: str) -> Machine:
        home = homes / "guest"
        home.mkdir(exist_ok=True)
        known = (home / "launch-pipeline/keys/servers.json").exists() and "mac" in named(server)
        where = port(server) if known else server.owner.invite().line
        opened.append(Machine(home, "draft", where, "--draft-engine", "ngram", "--name", "mac", *arguments))
        return opened[-1]

    yield attach
    for lent in opened:
        lent.close()


def port(server: Pipeline) -> str:
    return ":".join(server.owner.invite().line.split(":")[1:3])


def named(server: Pipeline) -> dict[str, WorkerEntry]:
    return {entry.name: entry for entry in server.owner.workers()}


def drafting(server: Pipeline) -> bool:
    return any(entry.status == "active" for entry in server.owner.workers())


@pytest.mark.thorough
def test_a_draft_that_comes_in_the_middle_of_a_request_is_used(
    server: Pipeline, guest: Callable[..., Machine], reference: Reference
):
    lent = guest()
    worker = lent.worker()
    os.kill(worker, signal.SIGSTOP)

    result = generate_while(server, PROMPT, LONG, 3, lambda: os.kill(worker, signal.SIGCONT))

    assert result.tokens == reference(PROMPT, LONG).tokens
    assert result.statistics.hit_rate
    lent.process.send_signal(signal.SIGINT)
    assert lent.ended() == 130
    until(lambda: named(server)["mac"].status == "gone")


@pytest.mark.thorough
def test_a_join_line_that_this_machine_has_used_is_said_to_be_needed_no_longer(server: Pipeline, homes: Path):
    line = server.owner.invite().line
    for said in (False, True):
        with machine(homes / "twice", "draft", line, "--draft-engine", "ngram", "--name", "twice") as lent:
            lent.worker()
        assert ("has joined" in lent.said) is said


SLOW = pytest.mark.slow


@pytest.mark.thorough
@pytest.mark.parametrize(
    "end", ["revoke", *(pytest.param(way, marks=SLOW) for way in ("kill", "stop", "Ctrl-C", "kill the worker"))]
)
def test_a_draft_that_goes_disturbs_no_request(
    end: str, server: Pipeline, guest: Callable[..., Machine], reference: Reference
):
    lent = guest()
    until(lambda: drafting(server))
    worker = lent.worker()
    ways: dict[str, Callable[[], object]] = {
        "Ctrl-C": lambda: lent.process.send_signal(signal.SIGINT),
        "kill": lent.process.kill,
        "kill the worker": lambda: os.kill(worker, signal.SIGKILL),
        "stop": lambda: os.kill(worker, signal.SIGSTOP),
        "revoke": lambda: server.owner.revoke("mac"),
    }

    result = generate_while(server, PROMPT, PARAMS, 5, ways[end])

    assert result.tokens == reference(PROMPT, PARAMS).tokens
    if end == "revoke":
        assert lent.ended() == 2
        assert "revoked this machine" in lent.words
        assert "mac" not in named(server)
        return
    if end == "kill the worker":
        until(lambda: drafting(server) and lent.worker() != worker)
    if end == "stop":
        os.kill(worker, signal.SIGCONT)
    lent.close()
    until(lambda: named(server)["mac"].status == "gone", seconds=20.0)
    assert server.generate(PROMPT, PARAMS).tokens == reference(PROMPT, PARAMS).tokens


@pytest.mark.usefixtures("home")
def test_a_machine_that_has_not_joined_is_told_how():
    with pytest.raises(InputError, match=r"has not joined a pipeline at 127\.0\.0\.1:9 .*ask its owner"):
        CliRunner().invoke(cli, ["attach", "draft", "127.0.0.1:9"], catch_exceptions=False)


@pytest.mark.thorough
def test_a_target_of_another_machine_serves_and_its_death_is_survived(
    homes: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(homes / "server-2"))
    home = homes / "studio"
    with Pipeline(listen="127.0.0.1:0", target_engine="none", draft_engine="ngram") as server:
        with machine(home, "target", server.owner.invite().line) as first, server.stream(PROMPT, PARAMS) as stream:
            for count, _ in enumerate(stream):
                if count == 5:
                    first.process.kill()
                    break
            with machine(home, "target", port(server)):
                for _ in stream:
                    pass
        assert stream.result is not None
        assert stream.result.tokens == reference(PROMPT, PARAMS).tokens


# Prompts and prefixes ------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_prompt_may_be_read_on_another_machine_and_its_death_is_survived(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "server"))
    params = SamplingParams(temperature=0.8, seed=21, max_tokens=40)
    first, second = (tuple(random.Random(seed).choices(range(1, 4096), k=1500)) for seed in (61, 62))
    with (
        Pipeline(listen="127.0.0.1:0", prefill_engine="guest", prefill="always", strategy="ar") as server,
        machine(tmp_path / "reader", "prefill", server.owner.invite().line, "--name", "reader") as reader,
    ):
        until(lambda: "reader" in named(server) and named(server)["reader"].status == "ready")
        read = server.generate(first, params)
        before, worker = set(arenas(server)), reader.worker()
        os.kill(worker, signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(1) as thread:
                answer = thread.submit(server.generate, second, params)
                until(lambda: set(arenas(server)) - before)
                reader.process.kill()
                survived = answer.result()
        finally:
            # It can't notice that its parent is gone.
            os.kill(worker, signal.SIGKILL)
        until(lambda: named(server)["reader"].status == "gone")

    assert [read.tokens, survived.tokens] == [reference(first, params).tokens, reference(second, params).tokens]
    assert (read.statistics.adopted_tokens, survived.statistics.adopted_tokens) == (len(first) - 1, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("kept", [True, False])
def test_workers_of_other_machines_evaluate_a_repeated_prompt_once_if_the_owner_keeps_kv(
    kept: bool, tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "server"))
    prompt, params = tuple(range(100, 220)), SamplingParams(temperature=0.8, seed=3, max_tokens=24)
    journal = tmp_path / "journal"
    options: dict[str, Any] = {} if kept else {"arena_memory": 0}

    def adopted_by_the_draft() -> int:
        return max((message.adopted for message in of_worker(journal, Prefilled)), default=0)

    with (
        Pipeline(
            listen="127.0.0.1:0", target_engine="none", draft_engine="none", record=str(journal), **options
        ) as server,
        machine(tmp_path / "studio", "target", server.owner.invite().line, "--prefix-cache-memory", "64"),
        machine(tmp_path / "mini", "draft", server.owner.invite().line, "--draft-engine", "mlx", "--name", "mini"),
    ):
        until(lambda: "mini" in named(server) and named(server)["mini"].status == "active")
        results = [server.generate(prompt, params) for _ in range(2)]
        # On a busy machine the target may answer before the draft has evaluated the prompt.
        assert not kept or until(lambda: server.generate(prompt, params) and adopted_by_the_draft() == len(prompt) - 1)

    assert [result.tokens for result in results] == [reference(prompt, params).tokens] * 2
    assert [result.statistics.adopted_tokens for result in results] == [0, (len(prompt) - 1) * kept]
