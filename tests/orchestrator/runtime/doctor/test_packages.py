"""What `doctor` says of the installed packages: it asks for those that this Python and this system need."""

import importlib.metadata
from pathlib import Path

import pytest
from packaging import markers

from orchestrator.machine import hardware
from orchestrator.runtime.doctor.doctor import packages, reinstall

_COREML = "coremltools>=9.0; python_version < '3.14' and (sys_platform == 'darwin' or platform_machine == 'x86_64')"


@pytest.mark.parametrize(("version", "status"), [("3.13", "fail"), ("3.14", "ok")])
def test_a_package_without_a_wheel_for_this_python_is_not_missed(
    version: str, status: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: [_COREML])
    monkeypatch.setattr(hardware, "installed_version", lambda _: None)
    here = {**markers.default_environment(), "python_version": version, "sys_platform": "darwin"}
    monkeypatch.setattr(markers, "default_environment", lambda: here)

    assert packages().status == status


def test_a_package_that_is_too_old_is_named_with_the_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda _: ["click>=8.2", "zeroconf>=0.130; extra == 'discover'"]
    )
    monkeypatch.setattr(hardware, "installed_version", lambda _: "8.1")

    assert packages().text == "click is 8.1 and must be >=8.2"


def test_the_next_step_fits_the_way_of_installation(tmp_path: Path):
    assert "install launch-pipeline again with" in reinstall(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "launch-pipeline").touch()

    assert reinstall(tmp_path).startswith(f"delete {tmp_path}/.venv")
