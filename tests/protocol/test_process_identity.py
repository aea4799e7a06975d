"""A process has one start time until it ends, whichever way the system tells it."""

import ctypes
import errno
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

from protocol import process_identity
from protocol.process_identity import BsdInfo, start_time
from tests.support.processes import until


def child() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)


def test_a_process_has_one_start_time_until_it_ends():
    process = child()
    first, second = start_time(process.pid), start_time(process.pid)
    process.kill()
    process.communicate(timeout=60)

    assert first == second is not None
    assert start_time(process.pid) is None


def test_a_zombie_process_has_ended():
    process = child()
    process.kill()

    # Nobody has waited for it.
    until(lambda: start_time(process.pid) is None)
    process.communicate()


def test_ps_tells_the_time_of_the_start_in_no_time_zone():
    process = child()
    told = process_identity._from_ps(process.pid)

    assert told is not None
    assert abs(int(told) - time.time()) < 60
    assert process_identity._from_ps(2**22 + 1) is None
    process.communicate("")


def test_the_structure_is_libprocs():
    """Offsets of struct proc_bsdinfo: XNU, bsd/sys/proc_info.h, with MAXCOMLEN 16 (bsd/sys/param.h)."""
    assert ctypes.sizeof(BsdInfo) == 136
    assert (BsdInfo.pid.offset, BsdInfo.command.offset, BsdInfo.name.offset) == (12, 48, 64)
    assert (BsdInfo.nice.offset, BsdInfo.start_seconds.offset, BsdInfo.start_microseconds.offset) == (116, 120, 128)


def libproc(seconds: int = 0, error: int = 0) -> Any:
    """A library whose `proc_pidinfo` gives that start, or fails with that error."""

    def proc_pidinfo(pid: int, flavor: int, argument: int, buffer: Any, size: int) -> int:
        assert (flavor, argument, size) == (3, 0, 136)
        ctypes.set_errno(error)
        if error:
            return 0
        ctypes.cast(buffer, ctypes.POINTER(BsdInfo)).contents.start_seconds = seconds
        return size

    return SimpleNamespace(proc_pidinfo=proc_pidinfo)


def test_libproc_tells_the_seconds_of_the_start():
    assert process_identity._from_libproc(os.getpid(), libproc(1_700_000_000)) == "1700000000"


def test_a_process_that_libproc_does_not_find_has_ended():
    assert process_identity._from_libproc(os.getpid(), libproc(error=errno.ESRCH)) is None


def test_what_libproc_may_not_tell_ps_tells():
    told = process_identity._from_libproc(os.getpid(), libproc(error=errno.EPERM))

    assert told == process_identity._from_ps(os.getpid()) is not None
