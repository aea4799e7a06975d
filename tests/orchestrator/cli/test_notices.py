"""Laws of what commands say beside their answer: notes on stderr, and a list of workers, complete at any width."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich import console as rich_console

from orchestrator.api.settings import PipelineSettings
from orchestrator.cli import pipelines
from orchestrator.cli.commands.start import workers_table
from orchestrator.cli.pipelines import opened
from orchestrator.cli.report import print_whole
from protocol.messages.base import Level
from protocol.messages.client import PipelineState
from protocol.messages.remote import WorkerEntry
from tests.support.fake_pipeline import READY
from tests.support.paths import DEMO_TARGET


class OpenedPipeline:
    """Its context and its state."""

    def __init__(self, level: Level) -> None:
        self._level: Level = level

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...

    def state(self) -> PipelineState:
        return replace(READY, level=self._level)


@pytest.mark.parametrize(
    ("level", "quiet", "words"),
    [
        ("tree", False, ""),
        ("chain", False, "one path of guesses"),
        ("plain", False, "no draft is used"),
        ("plain", True, ""),
    ],
)
def test_only_a_level_below_the_highest_is_told(
    level: Level, quiet: bool, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pipelines, "opened", lambda *_, **__: OpenedPipeline(level))
    with pipelines.started(PipelineSettings(), quiet=quiet):
        pass

    output, told = capsys.readouterr()
    assert output == ""
    assert words in told
    assert bool(words) == bool(told.strip())


# A divided target --------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "told"), [("10.0.0.", 1), ("127.0.0.", 0)])
def test_ranks_on_several_machines_are_warned_of_plain_traffic(
    host: str, told: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "hosts.json"
    file.touch(0o600)
    file.write_text(json.dumps({"hosts": [[f"{host}1:5711"], [f"{host}2:5711"]], "key": "k" * 32}))

    opened(PipelineSettings(target=str(DEMO_TARGET), draft_engine="none", target_hosts=str(file)), quiet=True)

    assert (
        capsys.readouterr().err.count("what MLX sends between the ranks is neither encrypted nor authenticated") == told
    )


# The list of workers -----------------------------------------------------------------------------


ENTRIES = (
    WorkerEntry(name="local", role="target", status="ready", engine="mlx", model="/models/Qwen2.5-3B-Instruct-4bit"),
    WorkerEntry(
        name="mac-studio-of-the-second-floor.local",
        role="draft",
        status="ready",
        engine="coreml",
        model="/models/Qwen2.5-0.5B-Instruct-converted",
        device="Apple M4 Pro, 16 cores of the Neural Engine",
        round_trip=0.00123,
        clock_offset=0.5,
    ),
    WorkerEntry(name="a-guest-without-workers", role=None, status="gone"),
)
WORDS = [
    *("mac-studio-of-the-second-floor.local", "Qwen2.5-0.5B-Instruct-converted (coreml)", "1.23 ms"),
    *("0.500000 s ± 0.61 ms", "Apple M4 Pro, 16 cores of the Neural Engine", "a-guest-without-workers"),
]


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int, terminal: bool) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(rich_console.Console, "is_terminal", property(lambda _: terminal))
    print_whole(workers_table(ENTRIES))
    return capsys.readouterr().out


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_word_is_broken_and_nothing_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int, terminal: bool
):
    output = shown(monkeypatch, capsys, width, terminal)

    assert [word for word in WORDS if word not in output] == []
    assert terminal or len(output.splitlines()) == 1 + len(ENTRIES)


def test_a_narrow_terminal_has_a_line_a_field(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    lines = shown(monkeypatch, capsys, 60, terminal=True).splitlines()

    assert lines[:5] == [
        "name: local",
        "role: target",
        "state: ready",
        "model: Qwen2.5-3B-Instruct-4bit (mlx)",
        "",
    ]
