"""Measures the bandwidth of the memory by streams through arrays that no cache holds.

`python -m orchestrator.lab.bench.costs.micro_bandwidth CORE,CORE,...` runs on these cores, one thread each, and
writes figures as JSON. The environment must keep numpy's own BLAS to one thread.
"""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from orchestrator.lab.findings import Value

_BYTES = 256 << 20
"""Of each of two arrays: several times the largest cache."""
_REPEATS = 9


def main() -> int:
    cores = [int(core) for core in sys.argv[1].split(",")]
    if set_affinity := getattr(os, "sched_setaffinity", None):
        set_affinity(0, cores)
    sys.stdout.write(msgspec.json.encode(figures(len(cores))).decode() + "\n")
    return 0


def figures(threads: int, size: int = _BYTES, repeats: int = _REPEATS) -> list[Value]:
    """Two streams, in bytes a second: a copy, which reads and writes, and a dot product, which reads.

    As in STREAM (McCalpin, 1995), each is the best repeat, and a written byte counts once.
    """
    sources, targets = (np.array_split(np.ones(size // 4, np.float32), threads) for _ in range(2))
    with ThreadPoolExecutor(threads) as pool:

        def best(stream: Callable[[Any, Any], object]) -> float:
            return 2 * size / min(_seconds(pool, stream, targets, sources) for _ in range(repeats))

        # numpy releases the interpreter's lock in both.
        return [
            Value("stream test, copy", best(np.copyto), "bytes/s"),
            Value("stream test, dot product", best(np.dot), "bytes/s"),
        ]


def _seconds(
    pool: ThreadPoolExecutor, stream: Callable[[Any, Any], object], targets: list[Any], sources: list[Any]
) -> float:
    began = time.perf_counter()
    list(pool.map(stream, targets, sources))
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
