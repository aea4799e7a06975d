"""Where MLX keeps the kernels that it compiles: a folder that no other user can write. Imports no MLX.

MLX compiles kernels for processors, and for CUDA, while it runs. It keeps them below the system's temporary folder,
and a later process loads a library that lies there, whoever wrote it (MLX, mlx/backend/cpu/jit_compiler.cpp). In a
folder that all users share, such as /tmp, that would be another user's code.
"""

import atexit
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from protocol.kernel_compiler import compile_for_this_processor
from protocol.paths import cache_folder

_STICKY_OR_CLOSED = stat.S_ISVTX | stat.S_IWOTH


def use_private_kernels() -> None:
    """Let MLX keep its kernels in `kernels_folder()`, in this process and its children, compiled for this processor.

    Python's temporary files stay where they were.
    """
    with suppress(OSError):
        # Python decides once, by the variable as it is now.
        tempfile.gettempdir()
    os.environ["TMPDIR"] = str(compile_for_this_processor(kernels_folder()))


def kernels_folder() -> Path:
    """A folder of mode 0700 of this user, to be the `TMPDIR` of a process that computes with MLX.

    The temporary folder itself where it is private already, as on macOS; else `kernels` in the cache folder; where that
    one can't be private, a new folder that is removed at this process's end.
    """
    given = next(filter(None, map(os.environ.get, ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))), None)
    if given is not None and _is_private(Path(given)):
        return Path(given)
    folder = cache_folder() / "kernels"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (_is_private(folder) and os.access(folder, os.W_OK)):
        folder = Path(tempfile.mkdtemp(prefix="launch-pipeline-kernels-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _is_private(folder: Path) -> bool:
    """Whether `folder` is this user's alone, and no other user could have put it in the place of another one."""
    with suppress(OSError):
        whole = folder.resolve(strict=True)
        found = whole.lstat()
        owned = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        return owned and all(map(_holds_its_entries, whole.parents))
    return False


def _holds_its_entries(folder: Path) -> bool:
    """Whether strangers can't rename what lies in `folder`."""
    found = folder.stat()
    return found.st_uid in (0, os.getuid()) and found.st_mode & _STICKY_OR_CLOSED != stat.S_IWOTH
