"""The processor cores that this process computes on."""

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")
_SET_THREADS = ("openblas_set_num_threads", "scipy_openblas_set_num_threads64_")
"""Of a distribution's OpenBLAS, and of NumPy's."""


def take_cores(cores: Sequence[int]) -> None:
    """Keep all threads on `cores`, and let OpenBLAS use one thread a core; nothing where the system can't, or for none.

    Affinity belongs to a thread, and a new thread has that of the one that starts it.
    """
    set_affinity = getattr(os, "sched_setaffinity", None)
    if not cores or set_affinity is None:
        return
    set_affinity(0, cores)
    for thread in _THREADS.iterdir() if _THREADS.is_dir() else ():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            set_affinity(int(thread.name), cores)
    preloaded = ctypes.CDLL(None)
    for name in _SET_THREADS:
        if hasattr(preloaded, name):
            getattr(preloaded, name)(len(cores))
