"""Files that hold secrets or private text: no other user can read them. Secrets are read only if that was always so,
and replaced atomically."""

import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from protocol.errors import InputError

_Form = TypeVar("_Form")


def is_private(found: os.stat_result) -> bool:
    """Whether these are the facts of something that this user alone can read, write or enter."""
    return found.st_uid == os.getuid() and not found.st_mode & 0o077


def private_folder(folder: Path) -> Path:
    """`folder`, made with mode 0700 if it is missing. Raises InputError if other users can enter it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise InputError(f"The folder {folder} can't be made ({error.strerror}): choose another.") from error
    if not is_private(found):
        raise InputError(f"The folder {folder} must be yours alone: run `chmod 700 {folder}`, or choose another.")
    return folder


def read_private(file: Path) -> bytes | None:
    """The content of `file`; None if it is missing. Raises InputError if other users could read or write it."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{file} can't be read ({error.strerror}): repair or remove it.") from error
    # By descriptor: the file that is checked is the file that is read.
    with os.fdopen(descriptor, "rb") as opened:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise InputError(f"{file} is not a regular file of yours: remove it, and a new one is made.")
        if found.st_mode & 0o077:
            raise InputError(
                f"Other users can read {file}, so its content may be known: remove it, and a new one is made "
                f"(or run `chmod 600 {file}` if you are alone on this machine)."
            )
        return opened.read()


def open_private(file: Path) -> BinaryIO:
    """`file`, emptied, to write text that nobody else may read: mode 0600, also if others could read it before. Raises
    OSError."""
    opened = os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
    try:
        # A pipe or a device keeps its mode.
        if stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            os.fchmod(opened.fileno(), 0o600)
    except OSError:
        opened.close()
        raise
    return opened


def lock_file(file: Path) -> BinaryIO:
    """`file`, to be locked; made if it is missing. Follows no link and empties no file, in case another user could
    write the folder. Raises OSError."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "r+b", buffering=0)


@contextmanager
def replacing(file: Path, unfinished: Path | None = None, *, replace: bool = True) -> Generator[Path]:
    """A path to write, of an empty file with mode 0600, which becomes `file` at the end; without `replace`, an existing
    file stays. Nothing stays of a file that could not be written. Raises OSError.

    `unfinished`: that path, where a killed process must leave one only; by default one that no other process writes.
    """
    # The end of the name stays: numpy and MLX go by it.
    path = unfinished or file.with_name(f".{secrets.token_hex(8)}-{file.name}")
    try:
        open_private(path).close()
        yield path
        if replace:
            path.replace(file)
        else:
            with suppress(FileExistsError):
                os.link(path, file)
    finally:
        path.unlink(missing_ok=True)


def kept(file: Path, form: type[_Form]) -> _Form | None:
    """What an earlier `keep` or `write_private` has left in JSON; None if it is missing or damaged."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=form)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def keep(file: Path, what: msgspec.Struct) -> None:
    """Leave it for `kept`, in a folder that is made if it is missing. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_private(file, msgspec.json.encode(what))


def write_private(file: Path, *pieces: bytes | memoryview, replace: bool = True) -> None:
    """Write `pieces` atomically, mode 0600, to last; without `replace`, an existing file stays."""
    with replacing(file, replace=replace) as unfinished, unfinished.open("wb") as opened:
        opened.writelines(pieces)
        opened.flush()
        os.fsync(opened.fileno())
