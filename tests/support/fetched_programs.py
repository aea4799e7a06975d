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
_FROM_NPM = {
    "codex": ("@openai/codex",),
    "claude": ("@anthropic-ai/claude-code",),
    "opencode": ("opencode-ai",),
    "qwen": ("@qwen-code/qwen-code",),
    "cn": ("@continuedev/cli",),
}
_FROM_PYPI = {"aider": ("aider-chat",)}


def path_with(command: str, folder: Path) -> str:
    """PATH with the program, which is fetched into `folder` unless it is there or installed. Skips the test if no
    registry has it."""
    path = os.environ["PATH"]
    if shutil.which(command) is not None:
        return path
    if command in _FROM_PYPI:
        return f"{python_with(_FROM_PYPI[command], folder / command).parent}:{path}"
    path = _path_with_node(folder)
    return f"{_from_npm(_FROM_NPM[command], folder / command, path)}:{path}"


def python_with(packages: Sequence[str], folder: Path) -> Path:
    """The interpreter of an environment at `folder` with these packages."""
    python = folder / "bin" / "python"
    if not _complete(folder).exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        _install(packages, [str(python), "-m", "pip", "install", "-q", *packages])
        _complete(folder).touch()
    return python


def _path_with_node(folder: Path) -> str:
    path = os.environ["PATH"]
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.removeprefix("v").split(".")[0]) >= _NODE:
        return path
    return f"{_from_npm((f'node@{_NODE}',), folder / 'node', path)}:{path}"


def _from_npm(packages: Sequence[str], folder: Path, path: str) -> Path:
    """The folder of their executables. npm runs on the Node of `path`."""
    if not _complete(folder).exists():
        install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
        _install(packages, install, PATH=path)
        _complete(folder).touch()
    return folder / "node_modules" / ".bin"


def _complete(folder: Path) -> Path:
    """Exists once all of a folder was fetched: a test that ends before leaves a part."""
    return folder / "complete"


def _install(packages: Sequence[str], words: Sequence[str], **variables: str) -> None:
    done = subprocess.run(words, env={**os.environ, **variables}, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(packages)} can't be fetched: {done.stderr.strip()[-300:]}")
