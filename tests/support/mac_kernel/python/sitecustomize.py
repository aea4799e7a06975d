"""Takes from Python's own modules what they lack on macOS; Python runs this at its start, since it is on PYTHONPATH.

Each name is one that CPython documents as missing there ("Availability"). `sys.platform` stays "linux": libraries that
were built for Linux would otherwise look for macOS's.
"""

import _socket
import os
import resource
import select
import signal
import sys

MISSING = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "sched_getparam", "sched_setscheduler", "memfd_create", "pipe2"),
        *("eventfd", "pidfd_open", "posix_fallocate", "posix_fadvise", "getrandom", "copy_file_range", "splice"),
        *("listxattr", "getxattr", "setxattr", "removexattr", "O_TMPFILE", "O_DIRECT", "getresuid", "getresgid"),
        # macOS has it, and Python only since 3.13.
        *(("waitid",) if sys.version_info < (3, 13) else ()),
    ),
    # Apple's SDK has it since XNU 11417; an interpreter that was built with an older one lacks it.
    _socket: ("MSG_NOSIGNAL", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "AF_NETLINK"),
    select: ("epoll",),
    signal: ("pidfd_send_signal", "sigtimedwait", "sigwaitinfo"),
    resource: ("prlimit",),
}

for module, names in MISSING.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
os.__all__ = [name for name in os.__all__ if hasattr(os, name)]
