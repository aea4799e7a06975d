"""Shared-memory segments that no crash leaks: each has an entry that names its owner. Knows nothing of their contents.

`sweep` unlinks what a dead owner left. The standard library's SharedMemory class is not used, because before
Python 3.13 its resource tracker unlinks a segment that other processes still use.
"""

import _posixshmem
import contextlib
import mmap
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol.kv import segment_registry
from protocol.kv.segment_registry import PREFIX, SegmentError, is_segment_name
from protocol.paths import SHARED_MEMORY

_library: Mapping[str, Any] = vars(_posixshmem)
"""`shm_open` and `shm_unlink`, which have no annotations."""


def create_segment(size: int, owner: int | None = None) -> tuple[str, mmap.mmap]:
    """A new zeroed segment of at least `size` bytes, mode 0600, and its name (24 characters with the slash, of
    macOS's 31). Raises SegmentError.

    It lives until `unlink_segment`, or until a sweep after process `owner` (default: this one) has ended.
    """
    free = free_shared_memory()
    if free is not None and size > free:
        raise SegmentError(
            f"{size >> 20:,} MiB of shared memory are needed and {free >> 20:,} MiB are free: "
            "end other pipelines, enlarge /dev/shm, or use a shorter context."
        )
    name = PREFIX + secrets.token_hex(10)
    segment_registry.register(name, owner or os.getpid())
    try:
        return name, _map_new(name, size)
    except OSError as error:
        unlink_segment(name)
        raise SegmentError(f"No shared memory could be had ({error.strerror}): end other pipelines.") from error


def open_segment(name: str) -> mmap.mmap:
    """Map the whole of an existing segment of this user, readable and writable. Raises SegmentError.

    It may be longer than it was created: macOS rounds up to pages of 16 KiB (XNU, posix_shm.c, pshm_truncate).
    """
    if not is_segment_name(name):
        raise SegmentError(f"{name[:40]!r} is no name of a shared-memory segment of this program.")
    try:
        descriptor: int = _library["shm_open"]("/" + name, os.O_RDWR, 0)
        try:
            return _map_existing(name, descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SegmentError(f"The shared-memory segment {name} can't be opened ({error.strerror}).") from error


def unlink_segment(name: str) -> None:
    """Remove the name; the memory is freed when the last process unmaps it. No error if that fails."""
    assert is_segment_name(name)
    with contextlib.suppress(OSError):
        _library["shm_unlink"]("/" + name)
    segment_registry.forget(name)


def stale_segments() -> list[str]:
    """Names of registered segments whose owner has ended. Raises SegmentError if others can write the registry."""
    return segment_registry.stale()


def sweep() -> list[str]:
    """Unlink every segment whose owner has ended; returns their names."""
    names = [*segment_registry.take_over_old_entries(), *stale_segments()]
    for name in names:
        unlink_segment(name)
    return names


def unlink_owned() -> None:
    """Unlink every segment that this process owns, also those that other processes created."""
    for name in segment_registry.owned():
        unlink_segment(name)


def free_shared_memory() -> int | None:
    """Bytes that a new segment may take, or None where the system sets no limit of its own (macOS).

    Pages of existing segments that no process has touched yet count as used: the system kills a process that touches
    a page for which no memory is left.
    """
    if not SHARED_MEMORY.is_dir():
        return None
    return max(0, shutil.disk_usage(SHARED_MEMORY).free - sum(map(_untouched, SHARED_MEMORY.glob(f"{PREFIX}*"))))


def _untouched(segment: Path) -> int:
    with contextlib.suppress(OSError):
        status = segment.stat()
        return max(0, status.st_size - 512 * status.st_blocks)
    return 0


def _map_new(name: str, size: int) -> mmap.mmap:
    descriptor: int = _library["shm_open"]("/" + name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Once: macOS refuses a second time.
        os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _map_existing(name: str, descriptor: int) -> mmap.mmap:
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid():
        raise SegmentError(f"The shared-memory segment {name} belongs to another user.")
    if not status.st_size:
        raise SegmentError(f"The shared-memory segment {name} is empty.")
    # Length 0 would mean the whole only of regular files, as Linux calls shared memory and macOS does not.
    return mmap.mmap(descriptor, status.st_size)
