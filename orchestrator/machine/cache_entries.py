"""Folders of this user's cache that are made once: complete or absent, also when two processes start at once."""

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from protocol.errors import InputError
from protocol.security.private_files import lock_file

_STAMP = "complete"


class UnwritableCache(InputError):
    """The cache folder can't be written. It says nothing about the model."""


def made_once(place: Path, make: Callable[[Path], None]) -> Path:
    """The folder `place`; if it is absent, `make` fills a temporary folder beside it, which is then renamed.

    Raises InputError if the cache can't be written, and what `make` raises. Nothing is left in both cases.
    """
    if place.is_dir():
        return place
    with exclusive(place):
        if not place.is_dir():
            _made(place, make)
    return place


def made_in_place(place: Path, make: Callable[[Path], None], needed: str) -> Path:
    """The same for a folder that holds its own path: `make` fills it where it stays, and a stamp says that it is
    complete. A folder without the stamp or without its file `needed` is made again.
    """
    if _is_complete(place, needed):
        return place
    with exclusive(place):
        if not _is_complete(place, needed):
            _made_in_place(place, make)
    return place


@contextmanager
def exclusive(place: Path) -> Iterator[None]:
    """Holds the lock of `place`. The kernel releases it when the process ends, however it ends."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_file(place.with_name(f"{place.name}.lock"))
    except OSError as error:
        raise _unwritable(place, error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _made(place: Path, make: Callable[[Path], None]) -> None:
    unfinished = place.with_name(f"{place.name}.unfinished")
    # A process that was killed leaves one. The lock is ours, so no other process is at work in it.
    shutil.rmtree(unfinished, ignore_errors=True)
    _sweep(place.parent)
    try:
        unfinished.mkdir()
        make(unfinished)
        unfinished.rename(place)
    except OSError as error:
        raise _unwritable(place, error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what killed processes left of places that nobody may ask for again: that of a file that has changed."""
    for unfinished in folder.glob("*.unfinished"):
        with suppress(OSError), lock_file(unfinished.with_suffix(".lock")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(unfinished, ignore_errors=True)


def _is_complete(place: Path, needed: str) -> bool:
    return (place / _STAMP).is_file() and (place / needed).is_file()


def _made_in_place(place: Path, make: Callable[[Path], None]) -> None:
    shutil.rmtree(place, ignore_errors=True)
    try:
        place.mkdir()
        make(place)
        (place / _STAMP).touch()
    except OSError as error:
        raise _unwritable(place, error) from error
    finally:
        if not (place / _STAMP).is_file():
            shutil.rmtree(place, ignore_errors=True)


def _unwritable(place: Path, error: OSError) -> UnwritableCache:
    words = error.strerror or type(error).__name__
    return UnwritableCache(
        f"The cache folder {place.parent} can't be written ({words}): make room or check its permissions, or let "
        "XDG_CACHE_HOME name another folder on Linux."
    )
