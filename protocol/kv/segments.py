"""Shared-memory segments that no crash leaks, and the private folder with a file for each that names its owner.

POSIX shared memory outlives every process, and macOS can't list it. So an entry is written before its segment exists
and removed after the segment is gone, and `sweep` unlinks what a dead owner left. The standard library's SharedMemory
class is not used, because before Python 3.13 its resource tracker unlinks a segment that other processes still use.
Knows nothing of the contents.
"""

import _posixshmem
import mmap
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import PipelineError
from protocol.paths import SEGMENTS_VARIABLE, SHARED_MEMORY, segments_folder
from protocol.processes import start_time
from protocol.security.private_files import is_private, replacing

PREFIX = "lp-"


class SegmentError(PipelineError):
    """A segment can't be made or found."""


class _Owner(msgspec.Struct, frozen=True):
    pid: int
    started: str


def is_segment_name(name: str) -> bool:
    """Whether this is a name that `create_segment` gives: nothing else is ever opened or unlinked."""
    digits = name.removeprefix(PREFIX)
    return len(name) == len(PREFIX) + 20 and len(digits) == 20 and set(digits) <= set("0123456789abcdef")


def register(name: str, owner: int) -> None:
    """Enter a segment that process `owner` is to own. Raises SegmentError."""
    folder = segments_folder()
    started = _beginning(owner)
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        _require_private(folder)
        # A sweep must never see half an entry.
        with replacing(folder / name) as unfinished:
            unfinished.write_bytes(msgspec.json.encode(_Owner(owner, started)))
    except OSError as error:
        raise SegmentError(
            f"Shared memory can't be listed in {folder} ({error.strerror}): make it writable."
        ) from error


def stale_segments() -> list[str]:
    """Names of registered segments whose owner has ended. Raises SegmentError if others can write the registry."""
    folder = segments_folder()
    _require_private(folder)
    # Most segments have the same owner.
    started = cache(start_time)
    return sorted(entry.name for entry in _entries(folder) if not _owner_lives(entry, started))


def _entries(folder: Path) -> Iterator[Path]:
    return (entry for entry in folder.glob(f"{PREFIX}*") if is_segment_name(entry.name))


def _require_private(folder: Path) -> None:
    """Refuse a registry that another user could have planted. It need not exist."""
    if os.path.lexists(folder) and not _is_private(folder):
        raise SegmentError(
            f"{folder} is not a private folder of this user: remove it, or let {SEGMENTS_VARIABLE} name another."
        )


def _is_private(folder: Path) -> bool:
    with suppress(OSError):
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and is_private(found)
    return False


@cache
def _beginning(owner: int) -> str:
    """Cached, since a process owns many segments, and no other process gets its id while it lives."""
    started = start_time(owner)
    if started is None:
        raise SegmentError(f"Process {owner}, which was to own a shared-memory segment, has ended.")
    return started


def _owner_lives(entry: Path, started: Callable[[int], str | None]) -> bool:
    try:
        owner = _owner(entry)
    except OSError:
        return True
    return owner is not None and started(owner.pid) == owner.started


def _owner(entry: Path) -> _Owner | None:
    """The owner that an entry names; None if the entry is broken. Raises OSError if it can't be read."""
    try:
        return msgspec.json.decode(entry.read_bytes(), type=_Owner)
    except msgspec.DecodeError:
        return None


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
    register(name, owner or os.getpid())
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
    with suppress(OSError):
        _library["shm_unlink"]("/" + name)
    with suppress(OSError):
        (segments_folder() / name).unlink(missing_ok=True)


def sweep() -> list[str]:
    """Unlink every segment whose owner has ended; returns their names."""
    names = stale_segments()
    for name in names:
        unlink_segment(name)
    return names


def unlink_owned() -> None:
    """Unlink every segment that this process owns, also those that other processes created."""
    own = _Owner(os.getpid(), start_time(os.getpid()) or "")
    for entry in _entries(segments_folder()):
        # Another process of this user may remove its own meanwhile.
        with suppress(OSError):
            if _owner(entry) == own:
                unlink_segment(entry.name)


def free_shared_memory() -> int | None:
    """Bytes that a new segment may take, or None where the system sets no limit of its own (macOS).

    Pages of existing segments that no process has touched yet count as used: the system kills a process that touches
    a page for which no memory is left.
    """
    if not SHARED_MEMORY.is_dir():
        return None
    return max(0, shutil.disk_usage(SHARED_MEMORY).free - sum(map(_untouched, SHARED_MEMORY.glob(f"{PREFIX}*"))))


def _untouched(segment: Path) -> int:
    with suppress(OSError):
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
