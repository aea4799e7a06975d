"""What processes are to the system: their start times, which identify them since ids are reused, how many files one may
have open, and the priority of a thread. Knows Linux's /proc, macOS's libproc and quality of service."""

import ctypes
import os
import resource
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any

_PROC_PIDTBSDINFO = 3
_NAME_BYTES = 16


class BsdInfo(ctypes.Structure):
    """macOS's struct proc_bsdinfo (XNU, bsd/sys/proc_info.h)."""

    _fields_ = (
        ("flags", ctypes.c_uint32),
        ("status", ctypes.c_uint32),
        ("exit_status", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
        ("parent", ctypes.c_uint32),
        ("users_and_groups", ctypes.c_uint32 * 6),
        ("reserved", ctypes.c_uint32),
        ("command", ctypes.c_char * _NAME_BYTES),
        ("name", ctypes.c_char * (2 * _NAME_BYTES)),
        ("files", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("job_control", ctypes.c_uint32),
        ("terminal", ctypes.c_uint32),
        ("terminal_group", ctypes.c_uint32),
        ("nice", ctypes.c_int32),
        ("start_seconds", ctypes.c_uint64),
        ("start_microseconds", ctypes.c_uint64),
    )


def start_time(pid: int) -> str | None:
    """When process `pid` began, in a form that can only be compared on this machine; None if it has ended.

    A killed process that its parent has not yet collected counts as ended.
    """
    if Path("/proc/self/stat").exists():
        return _from_proc(pid)
    return _from_libproc(pid, ctypes.CDLL(None))


def _from_proc(pid: int) -> str | None:
    """Field 22 of /proc/PID/stat, in ticks since boot (man 5 proc)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may itself hold blanks and parentheses.
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else rest[18]


def _from_libproc(pid: int, library: ctypes.CDLL) -> str | None:
    """In seconds since 1970. `proc_pidinfo` finds no zombies and no other user's processes, and returns 0 for an error
    (XNU, libproc.c and proc_info.c)."""
    info = BsdInfo()
    size = ctypes.sizeof(info)
    library.proc_pidinfo.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int)
    found = library.proc_pidinfo(pid, _PROC_PIDTBSDINFO, 0, ctypes.byref(info), size) == size
    return str(info.start_seconds) if found else None


_WANTED = 10_240
"""macOS's OPEN_MAX (bsd/sys/syslimits.h), which it accepts at most (setrlimit(2), Compatibility)."""


def raise_descriptor_limit() -> None:
    """Let this process and its children open 10,240 files, or as many as the hard limit allows.

    A terminal of macOS starts programs with 256: fewer than the connections of a server, or a worker's mapped arenas.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # Some containers refuse; then the old limit holds.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptor_limit() -> int:
    """How many this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _WANTED if soft == resource.RLIM_INFINITY else soft


def keep_descriptor_limit() -> None:
    """Let no library lower how many files this process may open, or fail because it asks for more than allowed.

    mlx-lm asks for 2,048 and at most 4,096 when it is imported (mlx_lm/utils.py). That lowers our limit, and raises
    where the hard limit is lower, as with `ulimit -n 1024`, which containers have.
    """
    resource.setrlimit = _raise_only


def _raise_only(kind: int, limits: tuple[int, int]) -> None:
    soft, hard = resource.getrlimit(kind)
    if kind != resource.RLIMIT_NOFILE:
        _set_limit(kind, limits)
    elif soft != resource.RLIM_INFINITY:
        wanted = limits[0] if hard == resource.RLIM_INFINITY else min(limits[0], hard)
        _set_limit(kind, (max(soft, wanted), hard))


_set_limit = resource.setrlimit


_NICE = 10


class QualityOfService(IntEnum):
    """`qos_class_t` of Apple's <sys/qos.h>."""

    USER_INTERACTIVE = 0x21
    """A user waits for the result."""
    UTILITY = 0x11
    """A user may watch the progress, and does not wait."""


def system_library() -> Any:
    return ctypes.CDLL("/usr/lib/libSystem.B.dylib")


def set_quality_of_service(quality: QualityOfService, library: Callable[[], Any] = system_library) -> None:
    """Set the class of the calling thread; other threads, older or newer, keep theirs. Does nothing elsewhere.

    Apple's <pthread/qos.h>: `int pthread_set_qos_class_self_np(qos_class_t, int relative_priority)`, 0 or an error
    number. After an error the thread works as before, and standard error tells the reason.
    """
    if sys.platform != "darwin":
        return
    try:
        function = library().pthread_set_qos_class_self_np
        function.argtypes, function.restype = (ctypes.c_uint, ctypes.c_int), ctypes.c_int
        if error := function(quality, 0):
            raise OSError(error, os.strerror(error))
    except (OSError, AttributeError) as error:
        sys.stderr.write(f"macOS refused the class {quality.name} for this process ({error}).\n")


def low_priority() -> None:
    """Let other threads go before the calling one, which is about to end."""
    set_quality_of_service(QualityOfService.UTILITY)
    if sys.platform == "linux":
        # There a nice value belongs to a thread.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
