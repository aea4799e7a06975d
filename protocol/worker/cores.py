"""The processor cores that this process computes on."""

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")


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
    set_threads = getattr(ctypes.CDLL(None), "openblas_set_num_threads", None)
    if set_threads is not None:
        set_threads(len(cores))
