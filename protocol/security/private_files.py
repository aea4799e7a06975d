"""Files that hold secrets: read only if nobody else could have read or written them, replaced as a whole."""

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from protocol.errors import InputError


def private_folder(folder: Path) -> Path:
    """`folder`, made with mode 0700 if need be. Raises InputError if it is not this user's alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise InputError(f"The folder {folder} can't be made ({error.strerror}): choose another.") from error
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InputError(f"The folder {folder} must be yours alone: run `chmod 700 {folder}`, or choose another.")
    return folder


def read_private(file: Path) -> bytes | None:
    """What is in `file`; None if it is not there. Raises InputError if it is not this user's alone."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{file} can't be read ({error.strerror}): mend or remove it.") from error
    with open(descriptor, "rb") as opened:  # noqa: PTH123 - by descriptor: what was checked is what is read
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise InputError(f"{file} is no file of yours: remove it, a new one will be made.")
        if found.st_mode & 0o077:
            raise InputError(
                f"{file} can be read by others, so what it holds may be known: remove it, a new one will be made "
                f"(or run `chmod 600 {file}` if you are alone on this machine)."
            )
        return opened.read()


def write_private(file: Path, content: bytes, replace: bool = True) -> None:
    """Put `content` in place at once, mode 0600; without `replace`, whatever is there already stays."""
    draft = file.with_name(f".{file.name}-{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as opened:  # noqa: PTH123
            opened.write(content)
            opened.flush()
            os.fsync(descriptor)
        if replace:
            draft.replace(file)
        else:
            with suppress(FileExistsError):
                os.link(draft, file)
    finally:
        draft.unlink(missing_ok=True)
