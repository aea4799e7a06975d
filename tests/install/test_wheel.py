"""Laws of the wheel, from which users install: it holds what is needed and nothing else, and each installer can use it.

Each installation goes into a fresh folder and takes packages from the index that pip is configured for.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

_PACKAGES = ("protocol", "draft_worker", "target_worker", "orchestrator")
_LEFT_OUT = {"draft_worker/training/own-text.xz"}
"""Text to train on."""
_MOST_BYTES = 40 << 20
"""The package index takes 100 MB; most of the wheel is three sets of weights."""
_PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def _call(*command: object, **environment: str) -> str:
    """Standard output. This process's environment and folder would hide what an installation lacks."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(word) for word in command],
        env={**kept, **environment},
        # `python -m` looks for modules in the current folder first: the checkout must not be it.
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def _python(version: str) -> str:
    """An interpreter of this machine with that version; skips the test if there is none."""
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for found in (shutil.which(f"python{version}"), *map(str, pyenv)):
        question = [str(found), "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        if found and subprocess.run(question, capture_output=True, text=True).stdout.strip() == version:
            return found
    pytest.skip(f"this machine has no Python {version}")


def _newest_python() -> str:
    for version in reversed(_PYTHONS):
        try:
            return _python(version)
        except pytest.skip.Exception:
            continue
    raise AssertionError("there is no Python to install with")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the files of the repository that git knows, as a release is."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in _tracked("."):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    _call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", built, source)
    [file] = built.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs uv and pipx."""
    folder = tmp_path_factory.mktemp("installers")
    _call(sys.executable, "-m", "venv", folder)
    _call(folder / "bin" / "python", "-m", "pip", "install", "--quiet", "uv", "pipx")
    return folder / "bin"


def _tracked(*folders: str) -> list[str]:
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *folders]
    return subprocess.check_output(command, text=True).rstrip("\0").split("\0")


def test_the_wheel_holds_the_packages_files_and_no_others(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]

    assert sorted(names) == sorted(set(_tracked(*_PACKAGES)) - _LEFT_OUT)
    assert wheel.stat().st_size < _MOST_BYTES


def test_the_wheel_states_its_licences_and_holds_their_texts(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = {name.partition(".dist-info/")[2] for name in archive.namelist()}
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        fields = Parser().parsestr(archive.read(metadata).decode())

    files = {"LICENSE", "draft_worker/default_draft/LICENSE", "draft_worker/default_draft/NOTICE"}
    assert fields["License-Expression"] == "MIT AND Apache-2.0"
    assert set(fields.get_all("License-File", [])) == files
    assert {f"licenses/{name}" for name in files} <= names


def _works(command: Path, folder: Path) -> None:
    """The installed command answers, has all that it needs, and generates with the demo pair."""
    settings = {"HOME": str(folder / "home"), "LAUNCH_PIPELINE_DEFAULT_TARGET": "demo"}
    (folder / "home").mkdir()
    assert _call(command, "--version", **settings).startswith("launch-pipeline")
    findings = json.loads(_call(command, "doctor", "--json", **settings))
    assert [finding for finding in findings if finding["status"] == "fail"] == []
    assert [finding["status"] for finding in findings if finding["name"] == "OpenBLAS"] in ([], ["ok"])
    told = json.loads(_call(command, "generate", "import os", "--max-tokens", "8", "--json", **settings))
    assert told["text"]


def test_pip_installs_the_wheel(wheel: Path, tmp_path: Path):
    environment = tmp_path / "environment"
    _call(_python(_PYTHONS[0]), "-m", "venv", environment)
    _call(environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile", wheel)

    _works(environment / "bin" / "launch-pipeline", tmp_path)


@pytest.mark.parametrize("version", _PYTHONS)
def test_uv_installs_the_wheel_as_a_tool(wheel: Path, tmp_path: Path, installers: Path, version: str):
    """uv is the fastest of the three, so it stands for them on each Python."""
    settings = {
        "UV_TOOL_DIR": str(tmp_path / "tools"),
        "UV_TOOL_BIN_DIR": str(tmp_path / "bin"),
        "UV_CACHE_DIR": str(installers.parent / "cache"),
        "UV_PYTHON_DOWNLOADS": "never",
    }
    _call(installers / "uv", "tool", "install", "--quiet", "--python", _python(version), wheel, **settings)

    _works(tmp_path / "bin" / "launch-pipeline", tmp_path)


def test_pipx_installs_the_wheel(wheel: Path, tmp_path: Path, installers: Path):
    settings = {"PIPX_HOME": str(tmp_path / "pipx"), "PIPX_BIN_DIR": str(tmp_path / "bin")}
    _call(installers / "pipx", "install", "--python", _newest_python(), wheel, **settings)

    _works(tmp_path / "bin" / "launch-pipeline", tmp_path)
