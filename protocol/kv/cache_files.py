"""Files of the disk cache: they appear whole, the least recently used are removed first. Knows nothing of contents.

Several processes may use one folder: files are never changed, and may vanish.
"""

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from protocol.errors import InputError
from protocol.paths import PREFIXES_VARIABLE, cache_folder
from protocol.security.private_files import kept, private_folder, write_private

_LABEL = "model.json"
_MODEL_NAME = re.compile(r"[0-9a-f]{32}")
"""Of a model's folder. The user may have put other things beside them."""
_LEFT = 0.9
"""Share of the limit that is left after a removal, so that not every file causes one."""
_CLOCK_SECONDS = 86_400.0
"""How far the clocks of machines with one home may be apart."""
_COUNTED = 32
"""Files that are written until those of other processes are counted again."""


class _Label(msgspec.Struct):
    model: str


class CacheFiles:
    """The files of one model."""

    def __init__(self, root: Path, name: str, model: str, limit: int) -> None:
        """`name`: of all that decides on contents. `model`: what users call it. `limit`: bytes of all models in
        `root`. Raises InputError for a folder that others can enter, OSError if it can't be written."""
        self._root = root
        self.folder = root / name
        self._label = msgspec.json.encode(_Label(model))
        self._limit = limit
        self._written = 0
        self._make()
        self._bytes = _size(root)

    def write(self, file: Path, pieces: Sequence[bytes | memoryview]) -> None:
        """Raises OSError, and InputError for a folder that others can enter."""
        if not (self.folder / _LABEL).exists():
            # The user has cleared the cache.
            self._make()
        try:
            write_private(file, *pieces)
        except FileNotFoundError:
            self._make()
            write_private(file, *pieces)
        self._written += 1
        self._bytes = (
            _size(self._root)
            if self._written % _COUNTED == 0
            else self._bytes + sum(memoryview(piece).nbytes for piece in pieces)
        )
        if self._bytes > self._limit:
            self._remove_oldest()

    def _make(self) -> None:
        private_folder(self._root)
        if self.folder.is_symlink():
            raise InputError(f"The folder {self.folder} is a link, which clearing does not follow: remove it.")
        private_folder(self.folder)
        write_private(self.folder / _LABEL, self._label)

    def _remove_oldest(self) -> None:
        # Files of times to come, which a clock that was wrong has left, would never be the oldest, and new ones always.
        latest = time.time() + _CLOCK_SECONDS
        files = sorted(_files(self._root), key=lambda file: file[2] if file[2] < latest else 0.0)
        self._bytes = sum(size for _, size, _ in files)
        for file, size, _ in files:
            if self._bytes <= _LEFT * self._limit:
                return
            with suppress(OSError):
                file.unlink()
                self._bytes -= size


def disk_cache_folder() -> Path:
    given = os.environ.get(PREFIXES_VARIABLE)
    return Path(given) if given else cache_folder() / "prefixes"


def touched(file: Path) -> bool:
    """Mark as used now; whether the file is there."""
    try:
        now = time.time()
        os.utime(file, (now, now), follow_symlinks=False)
    except OSError:
        return False
    return True


def model_folders(root: Path) -> list[Path]:
    try:
        return [entry for entry in model_entries(root) if entry.is_dir() and not entry.is_symlink()]
    except OSError:
        return []


def model_entries(root: Path) -> list[Path]:
    """What has the name of a model's folder, links included. Raises OSError for a folder that can't be read."""
    try:
        return [entry for entry in root.iterdir() if _MODEL_NAME.fullmatch(entry.name)]
    except FileNotFoundError:
        return []


def files_of(folder: Path) -> Iterator[tuple[Path, int, float]]:
    """Each file with its bytes and the time of its last use; also what a killed process left unfinished."""
    with suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name != _LABEL:
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    yield Path(entry.path), status.st_size, status.st_mtime


def label_of(folder: Path) -> str:
    """What users call the model; empty if that is not known."""
    label = kept(folder / _LABEL, _Label)
    return "" if label is None else label.model


def _files(root: Path) -> Iterator[tuple[Path, int, float]]:
    for folder in model_folders(root):
        yield from files_of(folder)


def _size(root: Path) -> int:
    return sum(size for _, size, _ in _files(root))
