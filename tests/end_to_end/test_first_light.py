"""The whole of `first-light` in its short form, with real processes: it runs, it can be stopped, it names nobody."""

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from orchestrator.cli.app import cli
from orchestrator.lab.first_light.report import LightReport
from orchestrator.lab.first_light.stages import stage_names
from orchestrator.machine.profiles.device_profiles import load_profile
from tests.support.paths import ROOT
from tests.support.processes import started_with, until

USER = "zquux"
SECONDS = 360


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder whose path and whose user must not be told."""
    folder = tmp_path / "homes of people" / USER
    folder.mkdir(parents=True)
    return folder


def command(home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator.cli.entry", "first-light", "--short"],
        cwd=home,
        env={**os.environ, "HOME": str(home), "USER": USER, "LOGNAME": USER, "XDG_CACHE_HOME": "", "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def running(home: Path) -> list[str]:
    return started_with(f"HOME={home}")


@pytest.mark.thorough
@pytest.mark.timeout(2 * SECONDS)
def test_a_stopped_short_form_goes_on_and_finds_nothing_wrong_and_names_nobody(home: Path):
    light = home / "first-light"
    stopped = command(home)
    until((light / "stages" / "machine.json").exists, SECONDS)
    until(lambda: len(running(home)) > 1)
    stopped.send_signal(signal.SIGINT)
    _, words = stopped.communicate(timeout=SECONDS)
    before = (light / "stages" / "machine.json").read_bytes()

    assert stopped.returncode == 130
    assert "the same command goes on with the others" in words
    assert (home / "first-light.zip").exists()
    until(lambda: not running(home))

    whole = command(home)
    output, words = whole.communicate(timeout=SECONDS)
    report = msgspec.json.decode((light / "report.json").read_bytes(), type=LightReport)
    states = {stage.stage: stage.status for stage in report.stages}

    assert not running(home)
    assert whole.returncode == 0, (output, words, [stage for stage in report.stages if not stage.good])
    assert "Going on with first-light" in words
    assert list(states) == stage_names()
    assert set(states.values()) <= {"done", "not here"}
    assert {name for name, state in states.items() if state != "done"} <= {"neural-engine", "second-bench", "sleep"}
    assert all(sentence in output for row in report.questions for sentence in row.answers)
    assert all(bool(row.answers) == (states[row.stage] == "done") for row in report.questions)
    assert all((stage.after is not None) == (stage.status == "done") for stage in report.stages)
    assert "Not answered: sleep (it needs you" in output
    assert (light / "stages" / "machine.json").read_bytes() == before
    assert load_profile(str(light / "profile.toml")).target.steps
    _require_nobody_named(light, str(home))


def _require_nobody_named(light: Path, home: str) -> None:
    with zipfile.ZipFile(light.with_name("first-light.zip")) as archive:
        texts = {f"zip: {name}": archive.read(name) for name in archive.namelist()}
    files = {str(path): path.read_bytes() for path in light.rglob("*") if path.is_file()}
    assert len(texts) == len(files)
    for name, content in {**texts, **files}.items():
        for secret in (USER, "homes of people", home, str(ROOT), sys.prefix):
            assert secret.encode() not in content, (name, secret)


def test_a_stage_that_does_not_exist_is_refused():
    refused = CliRunner().invoke(cli, ["first-light", "--only", "moon"])

    assert (refused.exit_code, "'moon' is not one of 'machine'" in refused.output) == (2, True)
