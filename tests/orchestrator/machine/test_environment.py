"""Laws of the cache's virtual environments: made once by the user's installer, complete or absent."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.machine import package_index
from orchestrator.machine import package_index as module
from orchestrator.machine.package_index import PYTHON, Unavailable, environment, environment_folder
from tests.support.package_index import NAME, Offer, ask_only, offer, serving
from tests.support.processes import running, until

_PINS = {NAME: "1.0"}


@pytest.fixture
def offered(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Offer]:
    """An index with a tiny package."""
    fresh = offer(home / "wheel")
    with serving(fresh) as url:
        ask_only(url, monkeypatch)
        yield fresh


def _ignore(_: int) -> None:
    """Takes no notice of progress."""


@pytest.mark.thorough
def test_the_environment_has_the_pinned_package_and_none_of_ours(offered: Offer):
    sizes: list[int] = []

    python = environment("tool", _PINS, sizes.append)

    question = "import importlib.metadata as m, json; print(sorted(d.name for d in m.distributions()))"
    assert subprocess.run([python, "-I", "-c", question], capture_output=True, text=True).stdout == f"['{NAME}']\n"
    assert max(sizes) > 0


def test_the_installer_is_told_the_true_version_of_macos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise it may take MLX's kernels for an older one; what the user has set does not change that."""
    monkeypatch.setenv("SYSTEM_VERSION_COMPAT", "1")
    installer = ["/bin/sh", "-c", f'echo "$SYSTEM_VERSION_COMPAT" > "{tmp_path}/told"']

    package_index.run_installer(installer, tmp_path, _ignore)

    assert (tmp_path / "told").read_text() == "0\n"


@pytest.mark.thorough
def test_two_uses_at_once_make_one_environment(offered: Offer):
    offered.pause = 0.05
    with ThreadPoolExecutor(2) as threads:
        pythons = list(threads.map(lambda _: environment("tool", _PINS, _ignore), range(2)))

    assert pythons[0] == pythons[1]
    assert len(offered.downloads) == 1


@pytest.mark.thorough
def test_without_an_index_the_reason_is_raised_and_nothing_is_left(offered: Offer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")

    with pytest.raises(Unavailable, match=r"python\S* says: "):
        environment("tool", _PINS, _ignore)
    assert not environment_folder("tool", _PINS).exists()


@pytest.mark.thorough
def test_an_index_that_falls_silent_is_given_up_and_no_installer_is_left(
    offered: Offer, monkeypatch: pytest.MonkeyPatch
):
    offered.silent = True
    monkeypatch.setattr(package_index, "STALL_SECONDS", 8.0)

    with pytest.raises(Unavailable, match="sent nothing for 8 s"):
        environment("tool", _PINS, _ignore)
    place = environment_folder("tool", _PINS)
    until(lambda: not [command for *_, command in running() if str(place) in command])
    assert not place.exists()


@pytest.mark.thorough
def test_an_environment_that_is_unfinished_or_whose_interpreter_is_gone_is_made_again(offered: Offer):
    place = environment_folder("tool", _PINS)
    (place / "bin").mkdir(parents=True)
    (place / PYTHON).write_text("half a program")
    python = environment("tool", _PINS, _ignore)
    assert subprocess.run([python, "-I", "-c", "pass"]).returncode == 0
    python.unlink()
    python.symlink_to("/no/such/python")

    assert subprocess.run([environment("tool", _PINS, _ignore), "-I", "-c", "pass"]).returncode == 0


def test_a_python_that_cannot_make_environments_is_a_reason(offered: Offer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_make", lambda command: _make_with(command[3:]))

    with pytest.raises(Unavailable, match=r"can't make a virtual environment: .*venv_that_is_missing"):
        environment("tool", _PINS, _ignore)
    assert not environment_folder("tool", _PINS).exists()


_make = module._make


def _make_with(arguments: list[str]) -> None:
    _make([sys.executable, "-m", "venv_that_is_missing", *arguments])
