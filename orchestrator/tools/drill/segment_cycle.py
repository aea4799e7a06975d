"""What a pipeline does with shared memory, by itself: `python -m orchestrator.tools.drill.segment_cycle ROLE [NAME]`.

An *owner* sweeps, as a start does, and starts a *writer*, which makes segments that belong to the owner and is
joined by an *attacher*. Each also runs a resource tracker of the standard library, and says its process ids and
segments. Then all wait to be killed.
"""

import os
import subprocess
import sys
from multiprocessing import resource_tracker
from pathlib import Path

from protocol.kv.segments import create_segment, open_segment, sweep

_SIZE = 1 << 16
_SEGMENTS = 3


def main() -> None:
    role, *names = sys.argv[1:]
    # The tracker is what unlinks segments that others still use, where one attaches by the standard library.
    resource_tracker.ensure_running()
    _say("process", os.getpid())
    if Path("/proc").is_dir():
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            _say("process", child)
    if role == "owner":
        sweep()
        _start("writer", str(os.getpid()))
    elif role == "writer":
        memory = [create_segment(_SIZE, owner=int(names[0])) for _ in range(_SEGMENTS)]
        for name, _ in memory:
            _say("segment", name)
        _start("attacher", *(name for name, _ in memory))
    else:
        held = [open_segment(name) for name in names]
        _say("attached", len(held))
    sys.stdin.read()


def _start(role: str, *arguments: str) -> None:
    subprocess.Popen([sys.executable, "-m", __spec__.name if __spec__ else "", role, *arguments], stdin=sys.stdin)


def _say(what: str, value: object) -> None:
    # One write a line: several processes share this pipe.
    os.write(sys.stdout.fileno(), f"{what} {value}\n".encode())


if __name__ == "__main__":
    main()
