"""The promises of docs/inside/survival.md about processes that die or stop at random moments. Real processes."""

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer

import pytest

from orchestrator import Pipeline, SamplingParams
from protocol.child_process import module_command
from protocol.kv.segments import sweep
from protocol.processes import start_time
from tests.conftest import Reference
from tests.support.paths import ROOT
from tests.support.processes import mark, members, remains, until
from tests.support.segments import exists

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]
PARAMS = SamplingParams(temperature=0.7, seed=3, max_tokens=120)
PROMPT = "class Stack:\n    def __init__(self):"


@contextmanager
def fault(pipeline: Pipeline, program: str, kind: signal.Signals, delay: float, known: set[int]) -> Iterator[None]:
    """Sends a signal to a process that is not yet `known`, `delay` seconds later; it has arrived at the end."""
    pid = until(lambda: {members(mark(pipeline)).get(program, 0)} - known - {0}).pop()
    known.add(pid)
    timer = Timer(delay, os.kill, (pid, kind))
    timer.start()
    yield
    timer.join()


@pytest.mark.parametrize("strategy", ["adaptive", "ssd", "sd"])
@pytest.mark.parametrize(
    ("program", "kind", "count"),
    [
        ("draft_worker", signal.SIGKILL, 3),
        ("draft_worker", signal.SIGSTOP, 1),
        ("target_worker", signal.SIGKILL, 2),
    ],
)
def test_a_worker_that_dies_or_stops_at_any_moment_changes_no_token(
    strategy: str, program: str, kind: signal.Signals, count: int, reference: Reference
):
    source = random.Random(7)
    with Pipeline(draft_engine="mlx", strategy=strategy) as pipeline:
        name, known = mark(pipeline), set[int]()
        began = time.monotonic()
        assert pipeline.generate(PROMPT, PARAMS).tokens == reference(PROMPT, PARAMS).tokens
        seconds = time.monotonic() - began
        for _ in range(count):
            with fault(pipeline, program, kind, source.uniform(0.0, seconds), known):
                assert pipeline.generate(PROMPT, PARAMS).tokens == reference(PROMPT, PARAMS).tokens
        for pid in known:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    until(lambda: not remains(name))


@contextmanager
def command(max_tokens: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`generate` as a shell's job. It drafts in MLX: the automatic engine would begin to convert the draft on a Mac."""
    arguments = ["generate", PROMPT, "--quiet", "--draft-engine", "mlx", "--max-tokens", str(max_tokens), *options]
    program = [sys.executable, "-P", "-S", str(ROOT / "bin" / ".start.py"), *arguments]
    with subprocess.Popen(
        program,
        text=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        yield process
        process.kill()


def test_ctrl_c_at_any_moment_ends_a_command_and_leaves_nothing(registry: Path):
    source = random.Random(7)
    with command(200) as process:
        began = time.monotonic()
        process.wait()
        seconds = time.monotonic() - began
    for moment in [source.uniform(0.0, limit) for limit in (0.4, 0.4, seconds / 2, seconds)]:
        with command(200) as process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(moment)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=30)
            # One that had just finished ends well.
            assert (process.returncode, errors.strip()) in [(130, ""), (130, "Interrupted."), (-2, ""), (0, "")]
        until(lambda name=f"lp-{process.pid}-": not remains(name), seconds=15.0)


def test_a_command_whose_orchestrator_is_killed_at_any_moment_says_so_and_leaves_nothing(registry: Path):
    source = random.Random(7)
    for _ in range(3):
        with command(2000, "--pace", "m4-16gb-qwen2.5-3b") as process:
            name = f"lp-{process.pid}-"
            pid = until(lambda name=name: members(name).get("orchestrator"))
            time.sleep(source.uniform(0.0, 3.0))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 1
            assert errors.startswith("Error: The orchestrator ended unexpectedly; start it again.")
        until(lambda name=name: not remains(name), seconds=15.0)


class Sharers:
    """An owner, a writer and an attacher of shared memory in a process group, as they report themselves."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [*module_command("tests.support.segment_processes"), "owner"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.segments: list[str] = []
        self._pids = {self.process.pid}
        self._rest = b""

    def read(self, seconds: float) -> None:
        """Reads their reports until so many seconds have passed, the attacher has attached, or all have ended."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        while select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            data = os.read(self.process.stdout.fileno(), 4096)
            *lines, self._rest = (self._rest + data).split(b"\n")
            reports = [line.decode().split() for line in lines]
            self.segments += [value for what, value in reports if what == "segment"]
            self._pids |= {int(value) for what, value in reports if what == "process"}
            if not data or any(what == "attached" for what, _ in reports):
                return

    def kill(self, source: random.Random) -> None:
        """Kills the known processes in a random order, then the rest of the group: some may be just starting."""
        for pid in source.sample(sorted(self._pids), len(self._pids)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            while self.process.poll() is None or any(map(start_time, self._pids)):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.read(5.0)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def test_no_shared_memory_leaks_when_all_who_share_it_are_killed(registry: Path):
    source = random.Random(7)
    made: list[str] = []
    for attached in (True, False, True, False):
        sharers = Sharers()
        sharers.read(20.0 if attached else source.uniform(0.0, 0.5))
        sharers.kill(source)
        made += sharers.segments

    sweep()

    assert len(made) >= 6
    assert not [name for name in made if exists(name)]
    assert not list(registry.glob("*"))
