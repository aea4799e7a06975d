"""Start times of processes, which identify them: ids are reused. Knows Linux's /proc and macOS's libproc."""

import ctypes
from pathlib import Path

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
