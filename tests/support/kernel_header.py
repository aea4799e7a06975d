"""What every kernel that MLX compiles includes, parsed once: of a kernel's 0.6 s three quarters are this header."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx

from protocol import kernels_folder

_HEADER = "mlx/backend/cpu/compiled_preamble.h"
_OPTIONS = ["-std=c++17", "-O3", "-Wall", "-fPIC", "-shared"]
"""MLX's own (mlx/backend/cpu/jit_compiler.cpp). A kernel with other ones reads the header itself."""


@contextmanager
def shared_header() -> Iterator[None]:
    """Put a `g++` in front of PATH that finds the parsed header, for this process and its children."""
    compiler, level = shutil.which("g++"), kernels_folder._level()
    if compiler is None:
        yield
        return
    with TemporaryDirectory(prefix="lp-header-") as name:
        folder = Path(name)
        (program := folder / "bin" / "g++").parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(compiler)} -I {shlex.quote(name)} "$@"\n')
        program.chmod(0o700)
        os.environ["PATH"] = os.pathsep.join((str(program.parent), os.environ["PATH"]))
        (parsed := folder / f"{_HEADER}.gch").parent.mkdir(parents=True)
        include = Path(mx.__file__).parent / "include"
        options = [*_OPTIONS, *([f"-march={level}", "-ffp-contract=off"] if level else []), "-I", str(include)]
        parse = [compiler, *options, "-x", "c++-header", str(include / _HEADER), "-o", f"{parsed}.new"]
        # At once, since kernels are compiled meanwhile.
        line = f"{shlex.join(parse)} && {shlex.join(['mv', f'{parsed}.new', str(parsed)])}"
        with subprocess.Popen(["/bin/sh", "-c", line], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            yield
