"""Shared-memory segments that no crash leaks: each has a file that names its owner. Knows nothing of their contents.

POSIX shared memory outlives every process, and macOS can't list it. So a file in a private folder is
written before a segment exists and removed after it is gone; `sweep` unlinks what a dead owner left.
The standard library's SharedMemory class is not used, because before Python 3.13 its resource tracker unlinks a
segment that other processes still use.
"""

import _posixshmem
import contextlib
import mmap
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec

from protocol.errors import PipelineError
from protocol.process_identity import start_time

_PREFIX = "lp-"
_LINUX_MEMORY = Path("/dev") / "shm"


class SegmentError(PipelineError):
    """A segment can't be made or found."""


class _Owner(msgspec.Struct, frozen=True):
    pid: int
    started: str


def create_segment(size: int, owner: int | None = None) -> tuple[str, mmap.mmap]:
    """A new zeroed segment of `size` bytes, mode 0600, and its name (24 characters with the slash on macOS's 31).

    It lives until `unlink_segment`, or until a sweep after process `owner` (default: this one) has ended.
    """
    free = free_shared_memory()
    if free is not None and size > free:
        raise SegmentError(
            f"{size >> 20:,} MiB of shared memory are needed and {free >> 20:,} MiB are free: "
            "end other pipelines, enlarge /dev/shm, or use a shorter context."
        )
    name = _PREFIX + secrets.token_hex(10)
    _register(name, owner or os.getpid())
    try:
        return name, _map_new(name, size)
    except OSError as error:
        unlink_segment(name)
        raise SegmentError(f"No shared memory could be had ({error.strerror}): end other pipelines.") from error


def open_segment(name: str) -> mmap.mmap:
    """Map the whole of an existing segment of this user, readable and writable."""
    if not is_segment_name(name):
        raise SegmentError(f"{name[:40]!r} is no name of a shared-memory segment of this program.")
    try:
        descriptor = _posixshmem.shm_open("/" + name, os.O_RDWR, 0)
    except OSError as error:
        raise SegmentError(f"The shared-memory segment {name} can't be opened ({error.strerror}).") from error
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise SegmentError(f"The shared-memory segment {name} belongs to another user.")
        return mmap.mmap(descriptor, 0)
    except ValueError as error:
        raise SegmentError(f"The shared-memory segment {name} is empty.") from error
    finally:
        os.close(descriptor)


def unlink_segment(name: str) -> None:
    """Remove the name; the memory is freed when the last process unmaps it. No error if the name does not exist."""
    assert is_segment_name(name)
    with contextlib.suppress(FileNotFoundError):
        _posixshmem.shm_unlink("/" + name)
    (_folder() / name).unlink(missing_ok=True)


def stale_segments() -> list[str]:
    """Names of registered segments whose owner has ended."""
    folder = _folder()
    _require_private(folder)
    entries = (entry for entry in folder.glob(f"{_PREFIX}*") if is_segment_name(entry.name))
    # On macOS `start_time` runs a process, and most segments have the same owner.
    started = cache(start_time)
    return sorted(entry.name for entry in entries if not _owner_lives(entry, started))


def sweep() -> list[str]:
    """Unlink every segment whose owner has ended; returns their names."""
    names = stale_segments()
    for name in names:
        unlink_segment(name)
    return names


def unlink_owned() -> None:
    """Unlink every segment that this process owns, also those that other processes created."""
    owner = _Owner(os.getpid(), start_time(os.getpid()) or "")
    for entry in _folder().glob(f"{_PREFIX}*"):
        if is_segment_name(entry.name) and _owner(entry) == owner:
            unlink_segment(entry.name)


def is_segment_name(name: str) -> bool:
    """Whether this is a name that `create_segment` gives: nothing else is ever opened or unlinked."""
    digits = name.removeprefix(_PREFIX)
    return len(name) == len(_PREFIX) + 20 and len(digits) == 20 and set(digits) <= set("0123456789abcdef")


def free_shared_memory() -> int | None:
    """Bytes that a new segment may take, or None where the system sets no limit of its own (macOS).

    Pages of existing segments that no process has touched yet count as used: the system kills a process that touches
    a page for which no memory is left.
    """
    if not _LINUX_MEMORY.is_dir():
        return None
    return max(0, shutil.disk_usage(_LINUX_MEMORY).free - sum(map(_untouched, _LINUX_MEMORY.glob(f"{_PREFIX}*"))))


def _untouched(segment: Path) -> int:
    with contextlib.suppress(OSError):
        status = segment.stat()
        return max(0, status.st_size - 512 * status.st_blocks)
    return 0


def _map_new(name: str, size: int) -> mmap.mmap:
    descriptor = _posixshmem.shm_open("/" + name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _folder() -> Path:
    """The registry; it need not exist yet."""
    return Path(tempfile.gettempdir()) / f"launch-pipeline-{os.getuid()}-segments"


def _require_private(folder: Path) -> None:
    """Refuse a registry that another user could have planted."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise SegmentError(f"{folder} is not a private folder of this user: remove it and start again.")


def _register(name: str, owner: int) -> None:
    entry = msgspec.json.encode(_Owner(owner, _beginning(owner)))
    folder = _folder()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    _require_private(folder)
    draft = folder / f".{name}"
    draft.write_bytes(entry)
    # A sweep must never see half an entry.
    draft.rename(folder / name)


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
    except FileNotFoundError:
        return True
    return owner is not None and started(owner.pid) == owner.started


def _owner(entry: Path) -> _Owner | None:
    """The owner that an entry names; None if the entry is broken."""
    try:
        return msgspec.json.decode(entry.read_bytes(), type=_Owner)
    except msgspec.DecodeError:
        return None
