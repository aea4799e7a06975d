"""The hardware of this machine, and the environment that a worker needs for it. A child imports MLX, not this file."""

import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import msgspec

from orchestrator.machine.blas.library import blas_environment, fast_blas
from orchestrator.machine.memory.budget import usable
from protocol.contracts.coreml import RuntimeName
from protocol.messages.base import Role
from protocol.paths import NARROW_VARIABLE, UNPACKED_VARIABLE
from protocol.system import installed_version

_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_QUESTION = """
import json, mlx.core as mx
info = mx.device_info()
print(json.dumps({
    "version": mx.__version__,
    "kind": "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu",
    "name": str(info.get("device_name") or info.get("architecture") or "unknown"),
    "working_set": int(info.get("max_recommended_working_set_size") or 0),
}))
"""
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Workers get local folders, so libraries must neither download nor print."""
_BLOCK_BYTES = 4 << 20
_KEPT_BYTES = 128 << 20
_WHOLE_BLOCKS = (
    {"MALLOC_MMAP_THRESHOLD_": str(_BLOCK_BYTES), "MALLOC_TRIM_THRESHOLD_": str(_KEPT_BYTES)}
    if sys.platform == "linux"
    else {}
)
"""Limits of glibc's malloc (mallopt(3)). Its own would soon take arrays up to 32 MiB from one heap. There KV that grows
leaves gaps that it never fits into, a tenth of its size."""


class MlxDevice(msgspec.Struct, frozen=True):
    """Where MLX computes by default."""

    version: str
    kind: str
    """cpu or gpu."""
    name: str
    working_set: int = 0
    """Bytes that macOS recommends for the GPU; 0 elsewhere."""


def worker_environment(role: Role, cores: Sequence[int]) -> dict[str, str]:
    """Environment variables, beyond our own, of a worker that will stay on `cores` (empty: its usual share).

    On a Linux processor MLX gets a fast BLAS where there is one.
    """
    if not computes_on_processor():
        return dict(_QUIET)
    environment = _QUIET | _WHOLE_BLOCKS | {"OPENBLAS_NUM_THREADS": str(len(cores or partition_cores()[role]))}
    memory = {NARROW_VARIABLE: str(narrow_memory()), UNPACKED_VARIABLE: str(usable(memory_bytes()))}
    return environment | blas_environment() | memory


def partition_cores() -> dict[Role, tuple[int, ...]]:
    """Processor cores for each worker where both compute on the processor; empty on macOS or with a GPU."""
    return partition(usable_cores()) if computes_on_processor() else {}


def partition(cores: Sequence[int]) -> dict[Role, tuple[int, ...]]:
    """A quarter (at least one) for the draft, the rest for the target; a single core is shared."""
    if len(cores) == 1:
        return {"target": tuple(cores), "draft": tuple(cores)}
    rest = len(cores) - max(1, len(cores) // 4)
    return {"target": tuple(cores[:rest]), "draft": tuple(cores[rest:])}


def usable_cores() -> tuple[int, ...]:
    """Logical cores this process may use; the threads of one physical core are neighbours.

    Where a quota allows the time of fewer, so many: more threads would use it up early in each period, and all stop.
    """
    # macOS's `os` lacks it.
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    if affinity is None:
        return tuple(range(os.cpu_count() or 1))
    cores = tuple(sorted(affinity(0), key=lambda core: (_first_sibling(core), core)))
    count = math.ceil(min([len(cores), *_processors()]))
    # Containers of one host must not all take its first cores; each has a name of its own.
    first = crc32(os.uname().nodename.encode()) % len(cores) if count < len(cores) else 0
    return (cores[first:] + cores[:first])[:count]


def is_quiet() -> bool:
    """Whether there is a core for every thread that wants to run. What fails otherwise, or is slow, may not be so
    again. A pipeline has about three such threads."""
    return os.getloadavg()[0] <= len(usable_cores())


def computes_on_processor() -> bool:
    """Whether MLX here is the Linux processor build. Asks MLX itself only where a CUDA build is installed."""
    if sys.platform != "linux":
        return False
    if not any(installed_version(name) for name in ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")):
        return True
    device = mlx_device()
    return not isinstance(device, MlxDevice) or device.kind == "cpu"


def computes_on_gpu() -> bool:
    """Whether MLX computes on a GPU here."""
    device = mlx_device()
    return isinstance(device, MlxDevice) and device.kind == "gpu"


@functools.cache
def mlx_device() -> MlxDevice | str:
    """MLX's default device as a child process finds it, or the last line of its error."""
    try:
        out = subprocess.run([sys.executable, "-c", _QUESTION], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "MLX gave no answer within 60 seconds"
    if out.returncode:
        return (out.stderr.strip().splitlines() or [f"exit code {out.returncode}"])[-1]
    return msgspec.json.decode(out.stdout, type=MlxDevice)


def gpu_working_set() -> int:
    """Bytes of models that the GPU of this Mac may hold without swapping; 0 elsewhere."""
    device = None if computes_on_processor() else mlx_device()
    return device.working_set if isinstance(device, MlxDevice) else 0


def lacks_fast_blas() -> bool:
    """Whether models compute here on a Linux processor with nothing but MLX's own BLAS: speculation can't help then."""
    return computes_on_processor() and fast_blas() is None


def narrow_memory() -> int:
    """Bytes that a worker may use for copies of its weights in 16 bits, which its products then read: an eighth of the
    memory, where they can be read."""
    blas = fast_blas() if computes_on_processor() else None
    return memory_bytes() // 8 if blas is not None and blas.reads_16_bits else 0


def memory_bytes() -> int:
    """Memory of this machine, or what a container or a service may use of it."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_memory_limits()])


def usable_bytes() -> int:
    """Bytes that a pipeline may use on this machine."""
    return usable(memory_bytes(), gpu_working_set())


def chip() -> str:
    """The processor's name."""
    if sys.platform == "darwin":
        out = subprocess.run(["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        return out.stdout.strip() or os.uname().machine
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, os.uname().machine)


def neural_engine() -> RuntimeName | None:
    """The runtime that reaches this machine's Neural Engine; None where there is none."""
    return "coreml" if sys.platform == "darwin" and os.uname().machine == "arm64" else None


def _processors() -> Iterator[float]:
    """How many processors' time this process may use, where a container or a service has a quota (`docker --cpus`)."""
    for text in _group_texts("cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        # Without a quota version 2 says `max`, version 1 -1.
        with suppress(ValueError):
            quota, period = map(int, text.split())
            if quota > 0 < period:
                yield quota / period


def _memory_limits() -> Iterator[int]:
    for text in _group_texts("memory", "memory.max", "memory.limit_in_bytes"):
        # It says `max` without a limit.
        with suppress(ValueError):
            yield int(text)


def _group_texts(controller: str, unified: str, *apart: str) -> Iterator[str]:
    """What the files of this process's control group and of those around it say (cgroups(7)): `unified` of version 2,
    and `apart` of version 1, one behind the other."""
    groups = _OWN_GROUPS.read_text().splitlines() if _OWN_GROUPS.is_file() else []
    for _, controllers, path in (group.split(":", 2) for group in groups):
        if not controllers:
            root, names = _GROUPS, (unified,)
        elif controller in controllers.split(","):
            root, names = _GROUPS / controller, apart
        else:
            continue
        # A container may see a group's path on its host, and has the group itself at the root.
        own = Path(path.lstrip("/"))
        for place in (own, *own.parents):
            with suppress(OSError):
                yield " ".join((root / place / name).read_text() for name in names)


def _first_sibling(core: int) -> int:
    siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        return int(siblings.read_text().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return core
