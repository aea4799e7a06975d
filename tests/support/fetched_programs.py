"""Programs of others for slow tests, from npm and PyPI, in a folder of the tests."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

_NODE = 22
"""npm gives an older Node older releases of some programs."""
_PACKAGES = {
    "codex": "@openai/codex",
    "claude": "@anthropic-ai/claude-code",
    "opencode": "opencode-ai",
    "qwen": "@qwen-code/qwen-code",
    "cn": "@continuedev/cli",
    "aider": "aider-chat",
}


def path_with(command: str, folder: Path) -> str:
    """PATH with the program, which is fetched into `folder` unless it is there or installed. Skips the test if no
    registry has it."""
    path = os.environ["PATH"]
    if shutil.which(command) is not None:
        return path
    package = _PACKAGES[command]
    if command == "aider":
        return f"{_from_pypi(package, folder / command)}:{path}"
    path = _path_with_node(folder)
    return f"{_from_npm(package, folder / command, path)}:{path}"


def _path_with_node(folder: Path) -> str:
    path = os.environ["PATH"]
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.removeprefix("v").split(".")[0]) >= _NODE:
        return path
    return f"{_from_npm(f'node@{_NODE}', folder / 'node', path)}:{path}"


def _from_npm(package: str, folder: Path, path: str) -> Path:
    """The folder of its executables. npm runs on the Node of `path`."""
    programs = folder / "node_modules" / ".bin"
    if not programs.exists():
        install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), package]
        _install(package, install, {**os.environ, "PATH": path})
    return programs


def _from_pypi(package: str, folder: Path) -> Path:
    programs = folder / "bin"
    if not programs.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        _install(package, [str(programs / "pip"), "install", "-q", package], dict(os.environ))
    return programs


def _install(package: str, words: Sequence[str], environment: dict[str, str]) -> None:
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{package} can't be fetched: {done.stderr.strip()[-300:]}")
