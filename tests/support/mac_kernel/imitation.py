"""Builds the imitation of macOS's kernel, and runs Python programs under it. See mac_kernel.h for what it imitates.

To run any test under it by hand: `python -m tests.support.mac_kernel.imitation -m pytest tests/protocol`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protocol.paths import SEGMENTS_VARIABLE
from tests.support.paths import ROOT

_HERE = Path(__file__).parent
_TEMPORARY_FOLDER_LENGTH = len("/var/folders/zz/zyxvpxvq6csfxvn_n0000000000000/T")
"""What `getconf DARWIN_USER_TEMP_DIR` gives, without the last slash (confstr(3))."""
_DAY_SECONDS = 24 * 3600
_KEPT_DAYS = 3
_XDG = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")


def missing() -> str | None:
    """Why the imitation can't be built here, as a sentence; None if it can."""
    if sys.platform != "linux":
        return "macOS's kernel is imitated on Linux alone."
    if shutil.which("cc") is None:
        return "The imitation of macOS's kernel needs a C compiler: install gcc or clang."
    if not Path("/dev/shm").is_dir() or Path("/dev/shm").stat().st_dev == Path("/dev").stat().st_dev:
        return "The imitation of macOS's kernel needs /dev/shm to be a file system of its own."
    return None


def build(folder: Path) -> Path:
    """The library, built in `folder`."""
    library = folder / "mac_kernel.so"
    sources = sorted(map(str, _HERE.glob("*.c")))
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(library), *sources, "-ldl"]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return library


class Mac:
    """A home, a temporary folder, and the variables of a program that takes this machine for a Mac."""

    def __init__(self, folder: Path) -> None:
        """`folder`: an empty folder with a short path."""
        self.home = folder / "home"
        self.temporary = Path(f"{folder}/".ljust(_TEMPORARY_FOLDER_LENGTH - 2, "x") + "/T")
        self.home.mkdir()
        self.temporary.mkdir(parents=True)
        self._library = build(folder)

    @property
    def environment(self) -> Mapping[str, str]:
        """What a program has beside this one's variables."""
        preloaded = f"{self._library} {os.environ.get('LD_PRELOAD', '')}".strip()
        path = os.pathsep.join(filter(None, [str(_HERE / "python"), os.environ.get("PYTHONPATH", "")]))
        return {
            **dict.fromkeys((*_XDG, SEGMENTS_VARIABLE), ""),
            "LD_PRELOAD": preloaded,
            "PYTHONPATH": path,
            "HOME": str(self.home),
            "TMPDIR": str(self.temporary),
        }

    def run(self, arguments: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run this interpreter with these arguments, from the project's folder."""
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **self.environment}, **options
        )

    def start(self, arguments: Sequence[str]) -> subprocess.Popen[str]:
        """As `run`, without waiting; its standard streams are pipes."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(
            [sys.executable, *arguments], text=True, cwd=ROOT, env={**os.environ, **self.environment}, **pipes
        )

    def let_days_pass(self, days: float) -> None:
        """As if nobody had used the files of the temporary folder for so long."""
        then = time.time() - days * _DAY_SECONDS
        for file in self.temporary.rglob("*"):
            os.utime(file, (then, then), follow_symlinks=False)

    def clean_temporary_folder(self) -> list[str]:
        """Remove files that nobody used for three days, as dirhelper does daily; their names.

        Only regular files: Apple's system_cmds, dirhelper.c, clean_directory and clean_files_older_than.
        """
        before = time.time() - _KEPT_DAYS * _DAY_SECONDS
        old = [
            file
            for file in self.temporary.rglob("*")
            if file.is_file() and not file.is_symlink() and _last_use(file) < before
        ]
        for file in old:
            file.unlink()
        return [file.name for file in old]


@contextmanager
def imitated_mac() -> Iterator[Mac]:
    """A Mac whose folders are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="mac-", dir="/tmp") as folder:
        yield Mac(Path(folder))


def _last_use(file: Path) -> float:
    status = file.lstat()
    return max(status.st_atime, status.st_mtime)


if __name__ == "__main__":
    with imitated_mac() as mac:
        program = [sys.executable, *sys.argv[1:]]
        sys.exit(subprocess.run(program, cwd=ROOT, env={**os.environ, **mac.environment}).returncode)
