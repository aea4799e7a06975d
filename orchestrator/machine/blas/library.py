"""Which BLAS MLX gets on a Linux processor. A child process finds out whether a library loads and computes.

MLX's wheel has the reference BLAS, which needs as long for 8 rows as for 8 times one row. `bridge.c` multiplies a few
rows itself. For more it calls the OpenBLAS of NumPy's wheels, which has kernels for each processor, under names of its
own and with 64-bit sizes.
"""

import functools
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from protocol.paths import cache_folder
from protocol.security.private_files import kept, write_private

HOW_TO_GET_ONE = "install OpenBLAS (Debian, Ubuntu: libopenblas0-pthread; Fedora: openblas-threads; Alpine: openblas)"
_THREAD_TIMEOUT = "14"
"""A thread without work sleeps after 2**14 cycles, a few µs (blas_server.c). OpenBLAS's own 2**26 or 2**28 are up to
0.1 s, in which it keeps a core from another worker."""
_SYSTEM = (
    f"/usr/lib/{platform.machine()}-linux-gnu/openblas-pthread/libblas.so.3",  # Debian, Ubuntu
    "/usr/lib64/libopenblasp.so.0",  # Fedora
    "/usr/lib64/libopenblas_pthreads.so.0",  # openSUSE
    "/usr/lib/libopenblas.so.0",  # Arch
    "/usr/lib/libopenblas.so.3",  # Alpine
    "/usr/lib/libopenblas.so",
)
_RECORD = "blas.json"
_TRIAL = """
import ctypes
library, real = ctypes.CDLL(None), ctypes.c_float
rows, columns, sums = 9, 40, 70
a, b, c = (real * (rows * sums))(*[1.0] * rows * sums), (real * (columns * sums))(*[2.0] * columns * sums), (
    real * (rows * columns))()
library.cblas_sgemm(101, 111, 112, rows, columns, sums, real(1.0), a, sums, b, sums, real(0.0), c, columns)
assert set(c) == {2.0 * sums}
for name in ("scipy_openblas_get_config64_", "openblas_get_config"):
    if hasattr(library, name):
        config = getattr(library, name)
        config.restype = ctypes.c_char_p
        print(config().decode())
        break
"""
"""Multiplies matrices as MLX does, and prints what OpenBLAS says of itself."""


class Blas(NamedTuple):
    """A library that loads and computes."""

    version: str
    """Of OpenBLAS; empty for another library."""
    origin: str
    environment: dict[str, str]
    """The variables with which a process gets it."""

    def __str__(self) -> str:
        return f"OpenBLAS {self.version} ({self.origin})" if self.version else self.origin

    @property
    def reads_16_bits(self) -> bool:
        """Whether it reads weights from copies in 16 bits (`protocol.inference.narrow_weights`)."""
        return "bridge-" in self.environment["LD_PRELOAD"]


class _Candidate(NamedTuple):
    file: Path
    origin: str
    names: tuple[str, ...]
    folders: tuple[Path, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """Names and folders are apart, because the variable of names is split at spaces too (ld.so(8))."""
        given = {"LD_PRELOAD": " ".join(self.names)}
        if self.folders:
            given["LD_LIBRARY_PATH"] = ":".join(map(str, self.folders))
        kept = {"LD_PRELOAD": " ", "LD_LIBRARY_PATH": ":"}
        return {name: kept[name].join(filter(None, (value, os.environ.get(name)))) for name, value in given.items()}


def blas_environment() -> dict[str, str]:
    """The variables with which a process that computes with MLX gets a fast BLAS; none where there is none."""
    blas = fast_blas()
    return {} if blas is None else blas.environment | {"OPENBLAS_THREAD_TIMEOUT": _THREAD_TIMEOUT}


def fast_blas() -> Blas | None:
    """One that the user preloads; else ours with NumPy's; else the system's."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    if "blas" in preloaded:
        environment = {"LD_PRELOAD": preloaded}
        version = _tried(*environment.items())
        if version is not None:
            return Blas(version, f"preloaded: {preloaded}", environment)
    return _loaded(_packaged()) or _loaded(_of_system())


def _packaged() -> _Candidate | None:
    """The bridge and the OpenBLAS of NumPy's wheel; None without that wheel, or without a bridge for the processor."""
    bridge = Path(__file__).with_name(f"bridge-{platform.machine()}.so")
    numpy = importlib.util.find_spec("numpy")
    if numpy is None or numpy.origin is None or not bridge.is_file():
        return None
    folder = Path(numpy.origin).parents[1] / "numpy.libs"
    for file in folder.glob("libscipy_openblas64_*.so"):
        return _Candidate(file, "NumPy's wheel", (file.name, bridge.name), (folder, bridge.parent))
    return None


def _of_system() -> _Candidate | None:
    return next((_Candidate(Path(name), name, (name,)) for name in _SYSTEM if Path(name).is_file()), None)


def _loaded(candidate: _Candidate | None) -> Blas | None:
    """None if it does not load, or does not compute. A success is kept for the next start, by the file's state."""
    if candidate is None:
        return None
    state = candidate.file.stat()
    key = f"{candidate.file} {state.st_size} {state.st_mtime_ns}"
    known = kept(cache_folder() / _RECORD, dict[str, str]) or {}
    version = known.get(key)
    if version is None:
        version = _tried(*candidate.environment.items())
        if version is None:
            return None
        # A cache that can't be written costs each start the child process.
        with suppress(OSError):
            cache_folder().mkdir(parents=True, exist_ok=True)
            write_private(cache_folder() / _RECORD, msgspec.json.encode({**known, key: version}))
    return Blas(version, candidate.origin, candidate.environment)


@functools.cache
def _tried(*environment: tuple[str, str]) -> str | None:
    """The version of the OpenBLAS that computes with these variables, empty if another library does; None: none."""
    variables = {**os.environ, **dict(environment), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-I", "-S", "-c", _TRIAL]
    try:
        done = subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        return None
    version = re.search(rb"OpenBLAS (\d+(?:\.\d+)*)", done.stdout)
    return version[1].decode() if version else ""


# How long forwards take ---------------------------------------------------------------------------

_PROGRAM = """
import json, statistics, time
import mlx.core as mx
hidden, keys, inner = 576, 192, 1536
shapes = [(hidden + 2 * keys, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
layers = [[mx.full(shape, 1 / shape[1]) for shape in shapes] for _ in range(6)]
mx.eval(layers)
def seconds(tokens):
    began, x = time.perf_counter(), mx.ones((tokens, hidden))
    for attention, output, up, down in layers:
        x = (x @ attention.T)[:, :hidden] @ output.T
        x = (x @ up.T)[:, :inner] @ down.T
    mx.eval(x)
    return time.perf_counter() - began
seconds(1), seconds(8)
rounds = [(seconds(1), seconds(8)) for _ in range(5)]
print(json.dumps([statistics.median(times) for times in zip(*rounds)]))
"""


class ForwardTimes(NamedTuple):
    """Seconds of six layers over one token and over eight."""

    one: float
    eight: float


def forward_times(environment: Mapping[str, str]) -> ForwardTimes | None:
    """Of a process with these variables beside this one's; None if it fails or takes a minute."""
    command = [sys.executable, "-c", _PROGRAM]
    try:
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, timeout=60)
        return msgspec.json.decode(done.stdout, type=ForwardTimes)
    except (subprocess.TimeoutExpired, msgspec.DecodeError):
        return None
