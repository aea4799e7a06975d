"""What `doctor` says of the installed packages, the local network and MLX's kernels."""

import errno
import importlib.metadata
import shutil
import sys
from pathlib import Path

import pytest

from orchestrator.machine.network import reachable_host
from orchestrator.runtime.doctor import (
    local_network,
    macos_version,
    metal_kernels,
    metal_wheel_target,
    neural_engine,
    reinstall,
)
from protocol.security.addresses import Endpoint

PIP = "SYSTEM_VERSION_COMPAT=0 {} install --force-reinstall launch-pipeline"


@pytest.mark.parametrize(
    ("place", "file", "package", "python"),
    [
        ("tools", "uv-receipt.toml", "uv tool upgrade --reinstall launch-pipeline", "--reinstall --python 3.13 launch"),
        ("venvs", "pipx_metadata.json", "pipx reinstall launch-pipeline", "pipx reinstall --python 3.13 launch"),
        ("Cellar/launch-pipeline/1.0/libexec", "", "brew reinstall launch-pipeline", "brew reinstall launch-pipeline"),
        ("conda", "conda-meta/history", PIP.format(f"{sys.executable} -m pip"), "conda create --name launch-pipeline"),
        ("venv", "", PIP.format(f"{sys.executable} -m pip"), "virtual environment of Python 3.13"),
        ("uv-venv", "", PIP.format("uv pip"), "virtual environment of Python 3.13"),
    ],
)
def test_the_next_step_fits_the_way_of_installation(
    place: str, file: str, package: str, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prefix = tmp_path / place
    (prefix / file).parent.mkdir(parents=True, exist_ok=True)
    (prefix / file).touch()
    for name in ("prefix", "base_prefix"):
        monkeypatch.setattr(sys, name, str(prefix))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None if place == "uv-venv" else True)

    assert reinstall(tmp_path) == package
    assert python in reinstall(tmp_path, python=True)


@pytest.mark.parametrize(
    ("programs", "words"),
    [
        ("brew uv", "brew install python@3.13"),
        ("uv", "uv python install 3.13"),
        ("", "Python 3.13 of https://www.python.org/downloads/macos"),
    ],
)
def test_a_mac_without_coremltools_is_told_how_to_get_it(
    programs: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In a checkout."""
    (tmp_path / "bash").symlink_to(shutil.which("bash") or "")
    for name in ("uname", *programs.split()):
        (tmp_path / name).write_text("#!/bin/bash\necho Darwin\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("orchestrator.machine.hardware.installed_version", lambda _: None)
    (finding,) = neural_engine("darwin")

    assert finding.status == "warn"
    assert "coremltools is not installed" in finding.text
    again = "then start bin/launch-pipeline again: it makes .venv again"
    assert finding.next_step == f"install another Python ({words}), {again}"
    assert reinstall().startswith(f"delete {Path(__file__).parents[3]}/.venv")


# The local network -------------------------------------------------------------------------------


def forbidden() -> None:
    raise OSError(errno.EHOSTUNREACH, "No route to host")


def test_on_macos_a_program_is_told_what_to_allow_or_that_others_may_not():
    denied, allowed = (local_network("192.168.1.5", "darwin", reach) for reach in (forbidden, lambda: None))

    assert (denied.status, allowed.status) == ("warn", "ok")
    assert "in Terminal and over SSH no permission is needed" in (denied.next_step or "")
    assert "launchd agent, may be refused" in allowed.text


def test_a_join_line_names_the_bound_host_unless_that_means_any():
    assert reachable_host(Endpoint("192.168.1.5", 1)) == "192.168.1.5"
    assert reachable_host(Endpoint("0.0.0.0", 1)) not in ("0.0.0.0", "")


# MLX's kernels on a Mac --------------------------------------------------------------------------


def test_a_build_for_an_older_macos_is_told_with_the_next_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("orchestrator.machine.hardware.installed_version", lambda _: "0.32.4")
    finding = metal_kernels("26.1", 15)

    assert finding.status == "warn"
    assert "built for macOS 15, and this is macOS 26.1" in finding.text
    for words in ("SYSTEM_VERSION_COMPAT=0", "mlx==0.32.4 mlx-metal==0.32.4"):
        assert words in (finding.next_step or "")


@pytest.mark.parametrize(
    ("system", "built_for"), [("26.1", 26), ("15.6.1", 15), ("14.7", 14), ("27.0", 26), ("", 15), ("26.1", None)]
)
def test_the_newest_build_that_fits_is_fine_and_what_is_not_known_is_no_warning(system: str, built_for: int | None):
    assert metal_kernels(system, built_for).status == "ok"


def test_the_wheel_names_the_macos_that_it_was_built_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    info = tmp_path / "mlx_metal-0.32.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-metal\nVersion: 0.32.4\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-macosx_15_0_arm64\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert metal_wheel_target() == 15
    assert importlib.metadata.version("mlx-metal") == "0.32.4"


def test_macos_is_asked_for_its_true_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A program that answers as macOS does: with SYSTEM_VERSION_COMPAT=1 it names an older version."""
    fake = tmp_path / "sw_vers"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = -productVersion ] || exit 64\n'
        'if [ "$SYSTEM_VERSION_COMPAT" = 1 ]; then echo 10.16; else echo 26.1; fi\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("SYSTEM_VERSION_COMPAT", "1")

    assert macos_version(str(fake)) == "26.1"
    assert macos_version(str(tmp_path / "absent")) == ""
