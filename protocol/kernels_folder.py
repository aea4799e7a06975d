"""Where MLX keeps the kernels that it compiles: a folder that no other user can write. Imports no MLX.

MLX compiles kernels for processors, and for CUDA, while it runs. It keeps them below the system's temporary folder,
and a later process loads a library that lies there, whoever wrote it (MLX, mlx/backend/cpu/jit_compiler.cpp). In a
folder that all users share, such as /tmp, that would be another user's code.

For any x86-64 it calls `g++ -O3`, where each step of an exponential is a call of `fmaf`, one number at a time. Another
program of that name, in front of it in PATH, adds the processor's level. Results are equal to the last bit: only what
MLX writes as one multiplication and addition is computed as one.
"""

import atexit
import os
import shlex
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from protocol.paths import cache_folder
from protocol.security.private_files import is_private, replacing

_V3 = frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_PROGRAM = """#!/bin/sh
{compiler} -march={level} -ffp-contract=off "$@" 2>/dev/null || exec {compiler} "$@"
"""
"""An older g++ does not know the level."""


def compile_for_this_processor(kernels: Path) -> Path:
    """Put the program in front of PATH, for this process and its children.

    Returns the folder in `kernels`, which nobody else can write, for what it compiles, since machines may share a home.
    Returns `kernels` itself where there is nothing to gain, no compiler, or no room.
    """
    level = _level()
    if level is None or kernels.name == level:
        return kernels
    compiler = shutil.which("g++")
    if compiler is None:
        return kernels
    folder = kernels / level
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        programs = folder / "bin"
        programs.mkdir(mode=0o700, exist_ok=True)
        _write(programs / "g++", _PROGRAM.format(compiler=shlex.quote(compiler), level=level))
    except OSError:
        return kernels
    os.environ["PATH"] = os.pathsep.join(filter(None, (str(programs), os.environ.get("PATH"))))
    return folder


def _level(facts: Path = Path("/proc/cpuinfo")) -> str | None:
    """The x86-64 psABI's highest level of this processor, where it is above the first two."""
    with suppress(OSError):
        for line in facts.read_text(errors="replace").splitlines():
            name, _, flags = line.partition(":")
            if name.strip() == "flags":
                has = frozenset(flags.split())
                return "x86-64-v4" if has >= _V4 else "x86-64-v3" if has >= _V3 else None
    return None


def _write(file: Path, text: str) -> None:
    """At once, since another process may run it."""
    with suppress(OSError):
        if file.read_text() == text:
            return
    with replacing(file) as new:
        new.write_text(text)
        new.chmod(0o700)


_STICKY_OR_CLOSED = stat.S_ISVTX | stat.S_IWOTH


def use_private_kernels() -> None:
    """Let MLX keep its kernels in `kernels_folder()`, in this process and its children, compiled for this processor.

    Python's temporary files stay where they were.
    """
    with suppress(OSError):
        # Python decides once, by the variable as it is now.
        tempfile.gettempdir()
    os.environ["TMPDIR"] = str(compile_for_this_processor(kernels_folder()))


def kernels_folder() -> Path:
    """A folder of mode 0700 of this user, to be the `TMPDIR` of a process that computes with MLX.

    The temporary folder itself where it is private already, as on macOS; else `kernels` in the cache folder; where that
    one can't be private, a new folder that is removed at this process's end.
    """
    given = next(filter(None, map(os.environ.get, ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))), None)
    if given is not None and _is_private(Path(given)):
        return Path(given)
    folder = cache_folder() / "kernels"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (_is_private(folder) and os.access(folder, os.W_OK)):
        folder = Path(tempfile.mkdtemp(prefix="launch-pipeline-kernels-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _is_private(folder: Path) -> bool:
    """Whether `folder` is this user's alone, and no other user could have put it in the place of another one."""
    with suppress(OSError):
        whole = folder.resolve(strict=True)
        found = whole.lstat()
        return stat.S_ISDIR(found.st_mode) and is_private(found) and all(map(_holds_its_entries, whole.parents))
    return False


def _holds_its_entries(folder: Path) -> bool:
    """Whether strangers can't rename what lies in `folder`."""
    found = folder.stat()
    return found.st_uid in (0, os.getuid()) and found.st_mode & _STICKY_OR_CLOSED != stat.S_IWOTH
