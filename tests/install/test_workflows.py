"""Laws of the workflows: pinned actions, few rights, and a release that was tested before it is published.

Read as text and YAML. The runners themselves can't be imitated here.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT

_FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(path.name for path in _FOLDER.glob("*.yml"))


def _read(name: str) -> dict[str, Any]:
    return yaml.safe_load((_FOLDER / name).read_text())


def _steps(job: dict[str, Any]) -> list[dict[str, Any]]:
    return job["steps"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_action_is_pinned_to_a_commit_and_names_its_version(name: str):
    uses = re.findall(r"uses: *(.+)", (_FOLDER / name).read_text())

    assert uses
    assert [use for use in uses if not re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use)] == []


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_job_ends_by_itself_and_starts_with_the_right_to_read(name: str):
    workflow = _read(name)

    assert workflow["permissions"] == {"contents": "read"}
    assert all(0 < job["timeout-minutes"] <= 90 for job in workflow["jobs"].values())


def test_only_the_last_two_jobs_of_a_release_may_write():
    jobs = _read("release.yml")["jobs"]

    rights = {name: job.get("permissions", {}) for name, job in jobs.items()}
    assert rights == {
        "build": {},
        "test": {},
        "publish": {"id-token": "write"},
        "release": {"attestations": "write", "contents": "write", "id-token": "write"},
    }


def test_what_is_published_is_what_was_tested_on_both_systems_and_all_pythons():
    workflow = _read("release.yml")
    jobs = workflow["jobs"]

    # YAML reads the key `on` as true.
    assert [value for key, value in workflow.items() if key not in ("name", "permissions", "jobs")] == [
        {"push": {"tags": ["v*"]}}
    ]
    assert [jobs[name]["needs"] for name in ("test", "publish", "release")] == ["build", "test", "publish"]
    assert {system.partition("-")[0] for system in jobs["test"]["strategy"]["matrix"]["system"]} == {"macos", "ubuntu"}
    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13", "3.14"]
    assert [name for name, job in jobs.items() if "build --outdir" in str(_steps(job))] == ["build"]
    assert jobs["publish"]["environment"] == "pypi"
    assert "password" not in str(jobs["publish"])


def test_shell_commands_take_nothing_from_expressions():
    """An expression in a command is text of a stranger in a program: such values come as variables."""
    for name in WORKFLOWS:
        for job in _read(name)["jobs"].values():
            assert [step["run"] for step in _steps(job) if "${{" in step.get("run", "")] == []


@pytest.mark.parametrize("name", WORKFLOWS)
def test_files_of_the_repository_that_a_workflow_names_exist(name: str):
    commands = " ".join(step.get("run", "") for job in _read(name)["jobs"].values() for step in _steps(job))

    for path in re.findall(r"(?:^| )((?:docs|\.ci|bin)/[\w./-]+)", commands):
        assert (ROOT / Path(path)).is_file(), path
