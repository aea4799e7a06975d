"""Workers of other machines, played by processes with keys of their own over loopback TCP: they come and go, and no
request notices. Real processes, real keys."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator import Pipeline, Result, SamplingParams
from orchestrator.machine.models.checkpoints import demo_model
from protocol.messages.remote import WorkerEntry
from tests.conftest import Reference
from tests.support.processes import until

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
        return until(lambda: _child(self.process.pid, "_worker"))

    def ended(self, seconds: float = 20.0) -> int:
        return self.process.wait(seconds)

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._words.close()


def _child(parent: int, program: str) -> int:
    listing = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,command="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listing.stdout.splitlines()]
    return next((int(pid) for pid, owner, command in rows if int(owner) == parent and program in command), 0)


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
    """A pipeline without a draft of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(homes / "server"))
        with Pipeline(listen="127.0.0.1:0", draft_engine="none") as pipeline:
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


def answer(server: Pipeline, params: SamplingParams, after: int, happens: Callable[[], object]) -> Result:
    """The result of a request during which, behind so many pieces of text, something happens."""
    with server.stream(PROMPT, params) as stream:
        for count, _ in enumerate(stream):
            if count == after:
                happens()
        assert stream.result is not None
        return stream.result


@pytest.mark.thorough
def test_a_draft_that_comes_in_the_middle_of_a_request_is_used(
    server: Pipeline, guest: Callable[..., Machine], reference: Reference
):
    lent = guest()
    worker = lent.worker()
    os.kill(worker, signal.SIGSTOP)

    result = answer(server, LONG, 3, lambda: os.kill(worker, signal.SIGCONT))

    assert result.tokens == reference(PROMPT, LONG).tokens
    assert result.statistics.hit_rate
    lent.process.send_signal(signal.SIGINT)
    assert lent.ended() == 130
    until(lambda: named(server)["mac"].status == "gone")


SLOW = pytest.mark.slow


@pytest.mark.thorough
@pytest.mark.parametrize(
    "end",
    ["revoke", *(pytest.param(way, marks=SLOW) for way in ("kill", "stop", "Ctrl-C", "kill the worker"))],
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

    result = answer(server, PARAMS, 5, ways[end])

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


@SLOW
def test_a_draft_that_stays_silent_is_given_up(server: Pipeline, guest: Callable[..., Machine]):
    lent = guest()
    until(lambda: drafting(server))
    worker = lent.worker()
    os.kill(worker, signal.SIGSTOP)
    try:
        assert until(lambda: named(server)["mac"].status == "gone", seconds=40.0)
    finally:
        os.kill(worker, signal.SIGCONT)
        lent.close()


@SLOW
def test_a_join_line_is_good_for_one_machine(server: Pipeline, homes: Path):
    line = server.owner.invite().line
    with machine(homes / "first", "draft", line, "--draft-engine", "ngram", "--name", "first") as first:
        until(lambda: "first" in named(server))
        with machine(homes / "second", "draft", line, "--draft-engine", "ngram", "--name", "second") as second:
            assert second.ended() == 2
            assert "join line was used or is older than ten minutes: ask for a new one" in " ".join(
                second.words.split()
            )
        assert first.process.poll() is None
    assert "second" not in named(server)
    server.owner.revoke("first")


@SLOW
def test_a_draft_with_another_tokenizer_is_sent_away_and_the_pipeline_lives_on(
    server: Pipeline, homes: Path, reference: Reference
):
    other = homes / "other-draft"
    _with_another_tokenizer(demo_model("draft"), other)
    line = server.owner.invite().line
    with machine(homes / "stranger", "draft", line, "--draft", str(other), "--name", "stranger") as stranger:
        assert stranger.ended(60.0) == 2
        assert re.search(r"has another tokenizer than the target", " ".join(stranger.words.split()))

    assert server.generate(PROMPT, PARAMS).tokens == reference(PROMPT, PARAMS).tokens
    server.owner.revoke("stranger")


def _with_another_tokenizer(source: Path, copy: Path) -> None:
    copy.mkdir()
    for file in source.iterdir():
        if file.name != "tokenizer.json":
            (copy / file.name).symlink_to(file)
    content = json.loads((source / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    first, second = list(words)[300:302]
    words[first], words[second] = words[second], words[first]
    (copy / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.thorough
def test_who_is_at_work_is_told_as_json(server: Pipeline, guest: Callable[..., Machine]):
    lent = guest()
    until(lambda: drafting(server) and named(server)["mac"].round_trip is not None)
    process = int(Path(server.address.removeprefix("ipc://")).parent.name.split("-")[1])
    command = [sys.executable, "-m", "orchestrator.cli.app", "workers", "list", "--json", "--pid", str(process)]

    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    ours = {row["name"]: row for row in told}
    assert ours["local"]["role"] == "target"
    assert (ours["mac"]["role"], ours["mac"]["engine"], ours["mac"]["status"]) == ("draft", "ngram", "active")
    # One clock on one machine.
    assert abs(ours["mac"]["clock_offset"]) <= ours["mac"]["round_trip"]
    lent.close()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("draft", "127.0.0.1:9"), "This machine has not joined a pipeline at 127.0.0.1:9"),
        (("draft", "lp1:127.0.0.1:9:short"), "This join line lacks a part"),
    ],
)
def test_what_cannot_be_attached_is_refused_with_a_sentence(arguments: tuple[str, ...], sentence: str, homes: Path):
    with machine(homes / "nobody", *arguments) as nobody:
        assert nobody.ended() == 2
        assert sentence in " ".join(nobody.words.split())
    (homes / "nobody" / "words").unlink()


@pytest.mark.thorough
def test_a_target_of_another_machine_serves_and_its_death_is_survived(
    homes: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(homes / "server-2"))
    home = homes / "studio"
    with Pipeline(listen="127.0.0.1:0", target_engine="none", draft_engine="ngram") as server:
        with (
            machine(home, "target", server.owner.invite().line) as first,
            server.stream(PROMPT, PARAMS) as stream,
        ):
            for count, _ in enumerate(stream):
                if count == 5:
                    first.process.kill()
                    break
            with machine(home, "target", port(server)):
                for _ in stream:
                    pass
        assert stream.result is not None
        assert stream.result.tokens == reference(PROMPT, PARAMS).tokens
