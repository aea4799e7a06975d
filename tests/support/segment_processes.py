"""Processes that use shared memory like a pipeline: `python -m tests.support.segment_processes ROLE`.

The *owner* removes stale segments, as a start does, and starts a *writer*. The writer creates segments that belong to
the owner and starts an *attacher*. Each process runs a resource tracker of the standard library, and reports its
process ids and segments on standard output. Then all wait to be killed.
"""

import os
import subprocess
import sys
from multiprocessing import resource_tracker
from pathlib import Path

from protocol.child_process import module_command
from protocol.kv.segments import create_segment, open_segment, sweep

_SIZE = 1 << 16
_SEGMENTS = 3


def main() -> None:
    role, *names = sys.argv[1:]
    # A resource tracker may unlink segments in use, if a process attaches by the standard library.
    resource_tracker.ensure_running()
    _report("process", os.getpid())
    if Path("/proc").is_dir():
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            _report("process", child)
    if role == "owner":
        sweep()
        _start("writer", str(os.getpid()))
    elif role == "writer":
        memory = [create_segment(_SIZE, owner=int(names[0])) for _ in range(_SEGMENTS)]
        for name, _ in memory:
            _report("segment", name)
        _start("attacher", *(name for name, _ in memory))
    else:
        held = [open_segment(name) for name in names]
        _report("attached", len(held))
    sys.stdin.read()


def _start(role: str, *arguments: str) -> None:
    subprocess.Popen([*module_command(__spec__.name if __spec__ else ""), role, *arguments], stdin=sys.stdin)


def _report(what: str, value: object) -> None:
    # One write a line: several processes share this pipe.
    os.write(sys.stdout.fileno(), f"{what} {value}\n".encode())


if __name__ == "__main__":
    main()
