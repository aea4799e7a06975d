"""Lets MLX compile the kernels of this processor with its vector instructions. Imports no MLX.

MLX calls `g++ -O3` for any x86-64 (mlx/backend/cpu/jit_compiler.cpp), where each step of an exponential is a call of
`fmaf`, one number at a time. A program of the same name in front of it in PATH adds the processor's level. Results are
equal to the last bit: only what MLX writes as one multiplication and addition is computed as one.
"""

import os
import shlex
import shutil
from contextlib import suppress
from pathlib import Path

from protocol.security.private_files import replacing

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
