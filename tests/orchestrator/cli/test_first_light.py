"""Laws of the command `first-light`: a password is asked for only if it is needed, and its last words say what next."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from orchestrator.cli.app import cli
from orchestrator.cli.commands.measurements import first_light as command
from orchestrator.lab.first_light import needs, power_meter
from orchestrator.lab.first_light.folder import LightFolder
from orchestrator.lab.first_light.report import StageReport

Start = Callable[..., Result]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often the password was asked for, on a Mac that can measure energy."""
    times: list[str] = []
    monkeypatch.setattr(command, "sys", SimpleNamespace(platform="darwin", exit=lambda _: None))
    monkeypatch.setattr(needs, "_no_energy", lambda settings: "" if settings.energy else "no --energy")
    monkeypatch.setattr(power_meter, "ask_for_rights", lambda: times.append("sudo"))
    return times


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """Runs the command with these options; its stages end as told."""

    def started(*options: str, **states: Any) -> Result:
        def run(folder: LightFolder, *_: object, **__: object):
            return folder.report(
                folder.save(StageReport(stage=name, title=name, status=status, reason="so"), "")
                for name, status in states.items()
            )

        monkeypatch.setattr(command, "_run", run)
        return CliRunner().invoke(
            cli, ["first-light", "--out", str(tmp_path / "light"), *options], catch_exceptions=False
        )

    return started


@pytest.mark.parametrize(
    ("options", "times"),
    [
        (["--energy"], 1),
        (["--energy", "--only", "energy"], 1),
        (["--energy", "--only", "machine"], 0),
        (["--energy", "--skip", "energy"], 0),
        (["--energy", "--minutes", "1"], 0),
        ([], 0),
    ],
)
def test_a_password_is_asked_for_if_energy_will_be_measured(
    start: Start, asked: list[str], options: list[str], times: int
):
    start(*options)

    assert len(asked) == times


def test_a_password_is_asked_for_again_if_the_energy_could_not_be_measured(start: Start, asked: list[str]):
    start("--energy", energy="failed")
    start("--energy", energy="done")
    start("--energy")

    assert len(asked) == 2
