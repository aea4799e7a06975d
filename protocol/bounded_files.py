"""Reads files that a user names: a device without end, or a file of gigabytes, is refused, not held."""

import errno
from pathlib import Path
from typing import IO, AnyStr

MIB = 1 << 20


def read_bounded(file: Path, mebibytes: int) -> bytes:
    """The content of `file`. Raises OSError, also if it is longer."""
    with file.open("rb") as opened:
        return bounded(opened, mebibytes)


def bounded(opened: IO[AnyStr], mebibytes: int) -> AnyStr:
    """What is left to read, of at most so many bytes or characters. Raises OSError if there is more."""
    content = opened.read(mebibytes * MIB + 1)
    if len(content) > mebibytes * MIB:
        raise OSError(errno.EFBIG, f"it has more than {mebibytes} MiB")
    return content
