"""Whatever reads a file that a user names reads a bounded part of it: devices have no end, and some files are huge."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator.cli.app import cli
from orchestrator.cli.commands.generate import prompt_text
from orchestrator.cli.commands.serve import server_key
from orchestrator.lab.bench.prompts import read_prompts
from orchestrator.machine.profiles.device_profiles import load_profile
from orchestrator.runtime import recording
from orchestrator.text.prompt_files import write_prompts
from protocol import bounded_files
from protocol.errors import InputError
from tests.support.paths import DEMO_TARGET

LINE = b'{"prompt": "a"}\n'


def command(*words: str) -> None:
    result = CliRunner().invoke(cli, words, standalone_mode=False)
    raise InputError(f"{result.output}{result.exception}")


def prompt(file: Path) -> None:
    with file.open(encoding="utf-8") as opened:
        prompt_text(None, opened)


READERS: dict[str, Callable[[Path], Any]] = {
    "--prompt-file": prompt,
    "--json-schema": lambda file: command("generate", "x", "--json-schema", str(file)),
    "--config": lambda file: command("--config", str(file), "generate", "x"),
    "--api-key-file": lambda file: server_key(None, file, False, "127.0.0.1"),
    "--pace": lambda file: load_profile(str(file)),
    "--prompts": lambda file: read_prompts(file, None),
    "--data": lambda file: write_prompts([file], DEMO_TARGET, file.with_name("out")),
}


@pytest.mark.parametrize("read", READERS.values(), ids=[*READERS])
def test_a_file_without_end_is_refused_when_its_bound_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], Any]
):
    monkeypatch.setattr(bounded_files, "MIB", 1)
    file = tmp_path / "file"
    file.write_bytes(LINE * 100)

    with pytest.raises(InputError, match="it has more than"):
        read(file)


def test_a_line_without_end_is_no_recorded_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recording, "_LONGEST_LINE", 2 * len(LINE))
    file = tmp_path / "file"
    file.write_bytes(b'[0.0, "Tick", {}' + b" " * 100 + b"]")

    with pytest.raises(ValueError, match="truncated"):
        list(recording.replay(file))


def test_a_pipe_without_end_is_refused():
    with Path("/dev/zero").open("rb") as endless, pytest.raises(OSError, match="it has more than 1 MiB"):
        bounded_files.bounded(endless, 1)
