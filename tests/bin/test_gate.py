"""The gate stops at the first check that fails."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

_BOOTSTRAP = """
prepare_environment() { :; }
fail() { printf '%s\\n' "$1" >&2; exit 1; }
"""


def _gate(folder: Path, type_checker: str, pytest: str = "echo a.py") -> tuple[int, str]:
    """The exit status of `bin/test`, and what it printed. Its tools are stand-ins; the type checker and pytest run
    these lines."""
    (folder / "bin").mkdir()
    shutil.copy(ROOT / "bin/test", folder / "bin/test")
    (folder / "bin/.bootstrap").write_text(_BOOTSTRAP)
    tools = folder / ".venv/bin"
    tools.mkdir(parents=True)
    lines = dict.fromkeys(("ruff", "lint-imports", "python"), "echo a.py")
    for name, line in {**lines, "basedpyright": type_checker, "pytest": pytest}.items():
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    ended = subprocess.run([folder / "bin/test"], capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("system", ["Linux", "Darwin"])
def test_an_error_of_types_on_either_system_stops_it(tmp_path: Path, system: str):
    code, printed = _gate(tmp_path, f'case "$*" in *{system}*) echo "wrong on {system}"; exit 1 ;; esac')

    assert code == 1
    assert f"wrong on {system}\n" in printed
    assert "types failed." in printed
    assert "-- tests" not in printed


def test_it_runs_the_tests_if_all_checks_pass(tmp_path: Path):
    code, printed = _gate(tmp_path, "exit 0")

    assert (code, "-- tests" in printed) == (0, True)


def test_a_test_process_that_dies_ends_it_with_the_name_of_its_test(tmp_path: Path):
    (tmp_path / "pyproject.toml").touch()
    for name in "abcdefgh":
        line = "__import__('os')._exit(1)" if name == "d" else "pass"
        (tmp_path / f"test_{name}.py").write_text(f"def test_one(): pass\ndef test_two(): {line}\n")
    code, printed = _gate(tmp_path, "exit 0", f'timeout 100 {sys.executable} -m pytest "$@"')

    assert code == 1
    assert "crashed while running 'test_d.py::test_two'" in printed
    assert "tests failed." in printed
