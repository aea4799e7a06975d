"""Shared memory as a test looks at it, and processes that share it."""

import subprocess
import sys

from protocol.kv.segments import SegmentError, open_segment
from tests.support.paths import ROOT


def exists(name: str) -> bool:
    """Whether a segment of this name can be opened."""
    try:
        open_segment(name).close()
    except SegmentError:
        return False
    return True


def child(module: str, script: str) -> subprocess.Popen[str]:
    """A process that runs a script with all names of a test module."""
    program = f"from {module} import *\n{script}"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, text=True, **pipes)
