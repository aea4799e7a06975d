"""Which shared-memory segments exist and who owns them: a private folder with a file for each. Opens no segment.

POSIX shared memory outlives every process, and macOS can't list it. So an entry is written before its segment exists
and removed after the segment is gone.
"""

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

from protocol.errors import PipelineError
from protocol.paths import SEGMENTS_VARIABLE, segments_folder
from protocol.process_identity import start_time

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
        _write(folder, name, _Owner(owner, started))
    except OSError as error:
        raise SegmentError(
            f"Shared memory can't be listed in {folder} ({error.strerror}): make it writable."
        ) from error


def forget(name: str) -> None:
    """Remove a segment's entry, if there is one."""
    with suppress(OSError):
        (segments_folder() / name).unlink(missing_ok=True)


def stale() -> list[str]:
    """Names of entries whose owner has ended."""
    folder = segments_folder()
    _require_private(folder)
    # Most segments have the same owner.
    started = cache(start_time)
    return sorted(entry.name for entry in _entries(folder) if not _owner_lives(entry, started))


def owned() -> list[str]:
    """Names of the segments that this process owns, also those that other processes created."""
    owner = _Owner(os.getpid(), start_time(os.getpid()) or "")
    names: list[str] = []
    for entry in _entries(segments_folder()):
        # Another process of this user may remove its own meanwhile.
        with suppress(OSError):
            if _owner(entry) == owner:
                names.append(entry.name)
    return names


def take_over_old_entries() -> list[str]:
    """Move the entries of earlier releases here, from the temporary folder. Returns those whose owner has ended.

    An owner counts as living if its process id is in use: on macOS its start was written in local time.
    """
    old = Path(tempfile.gettempdir()) / f"launch-pipeline-{os.getuid()}-segments"
    if SEGMENTS_VARIABLE in os.environ or not _is_private(old):
        return []
    ended: list[str] = []
    with suppress(OSError):
        for entry in _entries(old):
            owner = _owner(entry)
            if owner is None or start_time(owner.pid) is None:
                ended.append(entry.name)
            else:
                register(entry.name, owner.pid)
            entry.unlink()
        old.rmdir()
    return ended


def _entries(folder: Path) -> Iterator[Path]:
    return (entry for entry in folder.glob(f"{PREFIX}*") if is_segment_name(entry.name))


def _write(folder: Path, name: str, owner: _Owner) -> None:
    draft = folder / f".{name}"
    draft.write_bytes(msgspec.json.encode(owner))
    # A sweep must never see half an entry.
    draft.rename(folder / name)


def _require_private(folder: Path) -> None:
    """Refuse a registry that another user could have planted. It need not exist."""
    if os.path.lexists(folder) and not _is_private(folder):
        raise SegmentError(f"{folder} is not a private folder of this user: remove it and start again.")


def _is_private(folder: Path) -> bool:
    with suppress(OSError):
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
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
