"""How many files, sockets and mappings a process may have open. Knows no sockets."""

import resource
from contextlib import suppress

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
