"""The process that prepares the draft, as the orchestrator holds it: nothing of it ends the pipeline."""

import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.machine.drafts.preparation import Declined, Preparing
from orchestrator.runtime import draft_engine
from orchestrator.runtime.draft_engine import PreparingProcess

PRINTS = """
print('a library says something', flush=True)
print('{"type": "preparing", "text": "on its way"}', flush=True)
"""


def started(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> PreparingProcess:
    monkeypatch.setattr(draft_engine, "module_command", lambda _: [sys.executable, "-c", program])
    auto: Any = None
    monkeypatch.setattr(draft_engine, "PreparationOrder", lambda **_: {})
    return PreparingProcess(auto, 0, folder / "log")


def test_lines_that_a_library_prints_are_no_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    process, reports, ended = started(PRINTS, tmp_path, monkeypatch), [], False
    while not ended:
        more, ended = process.news()
        reports += more
    process.close()

    assert [type(report) for report in reports] == [Preparing, Declined]
