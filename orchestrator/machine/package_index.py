"""Runs the package installer that the user has, so that its index, proxy and certificates are used. Knows no models.

A wheel is fetched without dependencies: the installer checks its hash and runs no code of it.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from orchestrator.machine.cache_entries import made_in_place
from orchestrator.machine.network import reachable
from protocol.errors import InputError
from protocol.paths import cache_folder

PUBLIC_INDEX = "https://pypi.org"
_GLANCE = 0.1
"""Seconds between looks at what has come, at least."""
_REST = 10
"""A look may take one part in so many of the time."""
STALL_SECONDS = 60.0
"""After so long without a byte an index counts as not reachable."""
_END_SECONDS = 5.0
_QUIET = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off", "NO_COLOR": "1"}
_PATIENCE = {"PIP_RETRIES": "1", "UV_HTTP_RETRIES": "1"}
"""Unless the user has other values: a start without a network should not take long."""
_TRUE_VERSION = {"SYSTEM_VERSION_COMPAT": "0"}
"""macOS 26 calls itself 16.0 to a Python that was built for an older one (CPython issue 135675), unless told not to.
The installer would then choose a wheel for an older macOS."""
_WRONG_HASH = ("do not match the hashes", "hash mismatch")
_UNREACHED = "connection broken by"
"""pip names it in a warning only; its last words are that no version was found."""
_FULL = ("no space left on device", "os error 28")


class Unavailable(Exception):
    """The source can't be reached, or lacks what is wanted. The text is half a sentence: the reason."""


class Wheel(NamedTuple):
    """`sha256` and `size` are those of the one file that is accepted."""

    name: str
    version: str
    sha256: str
    size: int


def fetch_wheel(wheel: Wheel, folder: Path, on_bytes: Callable[[int], None]) -> None:
    """Fill the empty `folder` with the wheel's content. `on_bytes` gets how much has come, from time to time.

    Raises Unavailable if the index can't be reached or lacks the wheel, InputError for a wheel with another hash,
    OSError if the disk is full.
    """
    if _uses_public_index() and not reachable(PUBLIC_INDEX):
        raise Unavailable(f"{PUBLIC_INDEX} can't be reached")
    wheels = folder / "wheels"
    wheels.mkdir()
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    for command in _commands(requirements, wheels, folder / "environment"):
        run_installer(command, folder, on_bytes)
    for file in wheels.glob("*.whl"):
        with zipfile.ZipFile(file) as archive:
            archive.extractall(wheels)
        file.unlink()


def run_installer(command: Sequence[str], folder: Path, on_bytes: Callable[[int], None]) -> None:
    """Run an installer that fills `folder`. `on_bytes` gets the size of `folder`, from time to time.

    Raises Unavailable if it fails or if nothing comes for STALL_SECONDS, InputError for a file with another hash than
    required, OSError if the disk is full.
    """
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    # The installers write what comes to the folder for temporary files first.
    environment = {**_PATIENCE, **os.environ, **_QUIET, **_TRUE_VERSION, "TMPDIR": str(temporary)}
    with (folder / "words").open("w+b") as words:
        # A group of its own: pip starts another one for another interpreter, and both must end.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            stalled = not _ended(process, folder, on_bytes)
        finally:
            _end(process)
        words.seek(0)
        said = words.read().decode(errors="replace")
    if stalled:
        raise Unavailable(f"the package index sent nothing for {STALL_SECONDS:.0f} s")
    if process.returncode:
        _explain(said, Path(command[0]).name)


def preferred_uv() -> str | None:
    """The program uv if it is to be used: it installed this package, or there is no pip."""
    uv = shutil.which("uv")
    return uv if uv is not None and (_installed_by_uv() or not has_pip()) else None


def has_pip() -> bool:
    """Whether the Python that runs has pip."""
    return importlib.util.find_spec("pip") is not None


def _uses_public_index() -> bool:
    """Whether pip will fetch, and neither its files nor its variables name an index or a folder of packages."""
    if preferred_uv() or not has_pip():
        return False
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return not any(setting in listed.stdout for setting in ("index", "find-links"))


def _commands(requirements: Path, wheels: Path, environment: Path) -> list[list[str]]:
    """The installer's commands. pip comes from a new virtual environment if there is neither uv nor pip."""
    checks = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--requirement", str(requirements)]
    if uv := preferred_uv():
        return [[uv, "pip", "install", "--no-cache", "--python", sys.executable, "--target", str(wheels), *checks]]
    download = ["-m", "pip", "download", "--no-cache-dir", "--dest", str(wheels), *checks]
    if has_pip():
        return [[sys.executable, *download]]
    python = environment / "bin" / "python"
    return [[sys.executable, "-m", "venv", str(environment)], [str(python), *download]]


def _installed_by_uv() -> bool:
    try:
        return (importlib.metadata.distribution("launch-pipeline").read_text("INSTALLER") or "").strip() == "uv"
    except importlib.metadata.PackageNotFoundError:
        return False


def _ended(process: subprocess.Popen[bytes], folder: Path, on_bytes: Callable[[int], None]) -> bool:
    """Wait for its end; False as soon as nothing has come for too long."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        looked = time.monotonic()
        found = _size(folder)
        if found != size:
            size, since = found, time.monotonic()
            on_bytes(size)
        if time.monotonic() - since > STALL_SECONDS:
            return False
        # A look at many files takes long, and the installer needs the processor.
        _wait(process, max(_GLANCE, _REST * (time.monotonic() - looked)))
    return True


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _size(folder: Path) -> int:
    """Bytes of all files below; a file may vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).lstat().st_size
            except OSError:
                continue
    return total


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _explain(said: str, program: str) -> None:
    """Raises what the installer's words mean."""
    lowered = said.lower()
    if any(words in lowered for words in _WRONG_HASH):
        raise InputError(
            "The package index delivers another file than the expected one (wrong SHA-256), so nothing of it was kept: "
            "check the index in the installer's settings, or pass --target."
        )
    if any(words in lowered for words in _FULL):
        raise OSError(28, "No space left on device")
    if _UNREACHED in lowered:
        raise Unavailable("the package index can't be reached")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no words")
    raise Unavailable(f"{program} says: {reason[:200]}")


# Environments -------------------------------------------------------------------------------------

PYTHON = "bin/python"
"""The interpreter, relative to the environment."""


def environment(name: str, pins: Mapping[str, str], on_bytes: Callable[[int], None]) -> Path:
    """The Python of an environment with these versions of packages and their dependencies; installed on first use.

    `on_bytes` gets how much has been installed, from time to time. Raises Unavailable if the packages can't be
    installed, InputError if the cache can't be written.
    """
    place = environment_folder(name, pins)
    return made_in_place(place, lambda folder: _fill(folder, pins, on_bytes), PYTHON) / PYTHON


def environment_folder(name: str, pins: Mapping[str, str]) -> Path:
    """Where the environment is or will be: other versions, or another Python, have a folder of their own."""
    key = "\n".join([sys.version, sys.base_prefix, *_requirements(pins)])
    return cache_folder() / "environments" / f"{name}-{sha256(key.encode()).hexdigest()[:12]}"


def _fill(folder: Path, pins: Mapping[str, str], on_bytes: Callable[[int], None]) -> None:
    uv, pip = preferred_uv(), has_pip()
    # Debian's Python can make an environment without pip only, unless python3-venv is installed.
    _make([sys.executable, "-m", "venv", *(["--without-pip"] if uv or pip else []), str(folder)])
    python = str(folder / PYTHON)
    if uv is not None:
        command = [uv, "pip", "install", "--no-cache", "--python", python]
    elif pip:
        command = [sys.executable, "-m", "pip", "--python", python, "install", "--no-cache-dir"]
    else:
        command = [python, "-m", "pip", "install", "--no-cache-dir"]
    run_installer([*command, *_requirements(pins)], folder, on_bytes)
    shutil.rmtree(folder / "temporary")


def _make(command: list[str]) -> None:
    made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if made.returncode:
        lines = (made.stdout + made.stderr).strip().splitlines() or ["no words"]
        raise Unavailable(f"Python can't make a virtual environment: {lines[-1][:200]}")


def _requirements(pins: Mapping[str, str]) -> list[str]:
    return [f"{package}=={version}" for package, version in sorted(pins.items())]
