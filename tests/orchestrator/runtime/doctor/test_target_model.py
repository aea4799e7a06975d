"""What `doctor --target` says: the level that a process found, what it means, why it is no higher, or what is wrong."""

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from orchestrator.cli.app import cli
from orchestrator.machine.target import MEANINGS
from orchestrator.runtime.doctor import models
from orchestrator.runtime.doctor.models import described, target_finding
from protocol.contracts.model_report import ModelRefusal, ModelReport
from protocol.messages.base import Level
from target_worker.model_examination import examine
from tests.support.paths import DEMO_TARGET


def report(level: Level, reason: str = "") -> ModelReport:
    return ModelReport(architecture="lfm2", level=level, reason=reason, joins=False, context=4096)


def asked(*arguments: str, **environment: str) -> list[Any]:
    """The findings of `doctor --json`."""
    result = CliRunner().invoke(cli, ["doctor", "--json", *arguments], env=environment)
    assert result.stderr == ""
    return json.loads(result.stdout)


@pytest.mark.thorough
def test_a_target_is_loaded_in_a_process_of_its_own_and_its_level_told():
    (found,) = asked("--target", str(DEMO_TARGET))

    assert (found["name"], found["status"]) == ("target", "ok")
    assert f"(llama) is a tree model: {MEANINGS['tree']}. Several requests share a forward" in found["text"]


@pytest.mark.parametrize("level", ["chain", "plain"])
def test_a_lower_level_is_told_with_its_reason(level: Level):
    finding = described(Path("models/LFM2-1B"), report(level, "its recurrent layers keep one state."))

    assert finding.status == "ok"
    assert finding.text.startswith(f"LFM2-1B (lfm2) is a {level} model: {MEANINGS[level]}. It is no higher level: its")
    assert "keep one state. Several requests are evaluated in turns; the context is 4,096 tokens." in finding.text


@pytest.mark.parametrize(
    ("layers", "words"), [(6, "The states of its 6 layers can be recorded"), (0, "Its states can't be recorded")]
)
def test_whether_a_drafter_can_read_its_states_is_told(layers: int, words: str):
    found = described(Path("m"), msgspec.structs.replace(report("tree"), recorded_layers=layers))

    assert words in found.text


def test_a_model_that_can_not_be_loaded_is_told_with_its_sentence(tmp_path: Path):
    for file in DEMO_TARGET.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "no-such-model"}))
    refused = examine(tmp_path)

    assert isinstance(refused, ModelRefusal)
    finding = described(tmp_path, refused)
    assert (finding.status, finding.text) == ("fail", refused.text)
    assert "no-such-model" in finding.text


def test_a_name_without_a_model_is_a_failure_with_the_next_step(tmp_path: Path):
    result = CliRunner().invoke(cli, ["doctor", "--json", "--target", str(tmp_path / "none")])
    (found,) = json.loads(result.stdout)

    assert result.exit_code == 1
    assert "There is no folder" in found["text"]


def test_a_process_that_crashes_or_hangs_is_told(monkeypatch: pytest.MonkeyPatch):
    def crash(*_: Any, **__: Any) -> Any:
        return subprocess.CompletedProcess([], -9, b"", b"")

    def hang(*_: Any, **__: Any) -> Any:
        raise subprocess.TimeoutExpired([], 1.0)

    for end in (crash, hang):
        monkeypatch.setattr(models.subprocess, "run", end)
        finding = target_finding(str(DEMO_TARGET))
        assert (finding.status, finding.next_step is None) == ("fail", False)
        assert "crashed or hung" in finding.text


def test_a_target_in_the_environment_does_not_replace_the_examination_of_the_machine():
    assert len(asked(LAUNCH_PIPELINE_TARGET=str(DEMO_TARGET))) > 5
