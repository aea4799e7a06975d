"""Laws of `workers list`: no name or word is broken at any width, and what is piped is complete."""

import pytest
from rich import console as rich_console

from orchestrator.cli.commands.start import workers_table
from orchestrator.cli.report import print_whole
from protocol.messages.remote import WorkerEntry

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


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_piped_table_has_a_line_a_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
):
    assert len(shown(monkeypatch, capsys, width, terminal=False).splitlines()) == 1 + len(ENTRIES)


def test_a_narrow_terminal_has_a_line_a_field(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    lines = shown(monkeypatch, capsys, 60, terminal=True).splitlines()

    assert lines[:5] == [
        "name: local",
        "role: target",
        "state: ready",
        "model: Qwen2.5-3B-Instruct-4bit (mlx)",
        "",
    ]
