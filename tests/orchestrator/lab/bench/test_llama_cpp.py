"""Laws of llama.cpp as a rival: its own server and clock, the target's own file, and no process that stays."""

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from orchestrator.lab.bench import llama_cpp
from orchestrator.lab.bench.contender import GenerationTask, Measurement, Setting, deviating, is_checked
from orchestrator.lab.bench.figures import rows
from orchestrator.lab.bench.llama_cpp import LlamaCppContender, open_llama_cpp
from orchestrator.machine.checkpoints import gguf_file
from protocol.errors import PipelineError
from tests.support.bench_measurements import measurement
from tests.support.paths import DEMO_TARGET, ROOT
from tests.support.processes import until

_TASK = GenerationTask((7, 8, 9), 5, 0.0, 0)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file, beside a program on the PATH that needs nothing and stands for llama.cpp's."""
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT / "tests/support/fake_llama_server.py"} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    return tmp_path / "model.gguf"


@contextmanager
def opened(target: Path | None) -> Iterator[tuple[list[LlamaCppContender], dict[str, str]]]:
    """The contenders, and why others are absent."""
    absent: dict[str, str] = {}
    with ExitStack() as stack:
        name = None if target is None else str(target)
        yield open_llama_cpp(name, DEMO_TARGET, stack, lambda _: None, absent.__setitem__), absent


def _listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def test_its_speed_is_by_its_own_clock_from_the_prompts_last_token(file: Path):
    with opened(file) as ((plain, *_), absent):
        generation = plain.generate(_TASK)

    assert (plain.name, absent) == ("llama.cpp", {})
    assert (generation.tokens_per_second, generation.tokens_per_round) == (pytest.approx(5.0), pytest.approx(5 / 3))
    assert generation.tokens == (1, 2, 3, 4, 5)
    assert generation.time_to_first_token == generation.arrivals[0] <= generation.arrivals[-1] == generation.total_time


def test_what_its_version_lacks_is_named_and_the_rest_runs(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAKE_LLAMA", "ngram-map-k")
    with opened(file) as (contenders, absent):
        names = [contender.name for contender in contenders]

    assert absent.keys() == {"llama.cpp ngram-map-k"}
    assert "invalid argument: ngram-map-k" in absent["llama.cpp ngram-map-k"]
    assert names == [name for name in llama_cpp.DECODINGS if name not in absent]


def test_no_server_is_left_and_one_that_ended_is_an_error(file: Path):
    with opened(file) as (contenders, _):
        pass

    assert not any(_listens(contender.port) for contender in contenders)
    with pytest.raises(PipelineError, match=r"llama\.cpp gave no answer"):
        contenders[0].generate(_TASK)


def test_a_bench_that_is_killed_leaves_no_server(file: Path):
    program = f"""
import os, signal, sys
from contextlib import ExitStack
from pathlib import Path
from orchestrator.lab.bench.llama_cpp import open_llama_cpp

with ExitStack() as stack:
    found = open_llama_cpp({str(file)!r}, Path({str(DEMO_TARGET)!r}), stack, lambda _: None, lambda *_: None)
    print(*(each.port for each in found), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)

    ports = ended.stdout.split()
    assert (ended.returncode, len(ports)) == (-signal.SIGKILL, len(llama_cpp.DECODINGS))
    until(lambda: not any(_listens(int(port)) for port in ports))


def test_without_the_program_or_the_file_it_is_named_with_the_reason(file: Path, monkeypatch: pytest.MonkeyPatch):
    with opened(DEMO_TARGET) as found:
        assert found[0] == []
        assert "--target FILE.gguf" in found[1]["llama.cpp"]
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with opened(file) as found:
        assert found[0] == []
        assert "there is no llama-server on the PATH" in found[1]["llama.cpp"]


def test_a_target_s_file_is_the_one_that_its_name_means(file: Path):
    assert gguf_file(str(file)) == gguf_file(str(file.parent)) == file.resolve()
    assert gguf_file(str(DEMO_TARGET)) is gguf_file("Qwen/Qwen2.5-1.5B") is gguf_file("") is None


def test_its_tokens_are_not_compared_and_its_speed_is():
    other = measurement("llama.cpp", 40.0, tokens=(9, 9)).generation
    rival = Measurement(Setting(0, 0, 0.0), "llama.cpp", LlamaCppContender.family, other)
    found, names = [measurement("mlx-lm", 10.0), rival], ["mlx-lm", "llama.cpp"]
    row = rows(found, names)[1]

    assert not is_checked(rival)
    assert deviating(found, names) == []
    assert (row.rival, row.checked, row.ratios["mlx-lm"].median) == (True, 0, 4.0)
