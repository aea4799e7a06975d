"""The files of the disk cache: chunks of arenas, checked when read, the oldest ones removed first. Knows no threads.

Several processes may use one folder: files appear whole, are never changed, and may vanish.
"""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from orchestrator.machine.disk_cache.chunks import CHUNK, chunk_names
from protocol.errors import InputError
from protocol.kv.arena import Arena, ArenaChecksum
from protocol.kv.arena_header import (
    HEADER_BYTES,
    ArenaDamaged,
    ArenaError,
    ArenaHeader,
    ArenaMismatch,
    decode_header,
    encode_header,
)
from protocol.paths import cache_folder
from protocol.security.private_files import private_folder, read_private, write_private

_SUFFIX = ".kv"
_LABEL = "model.json"
_LEFT = 0.9
"""Share of the limit that is left after a removal, so that not every chunk causes one."""


class CachedModel(NamedTuple):
    """What is kept of one model."""

    folder: Path
    model: str
    """The model's folder or id, as it was when its KV was kept."""
    chunks: int
    bytes: int
    used: float
    """Time of the last use, in seconds since 1970."""


class _Label(msgspec.Struct):
    model: str


class ChunkStore:
    """The chunks of one model."""

    def __init__(self, root: Path, name: str, model: str, limit: int) -> None:
        """`name`: see `model_name`. `model`: what users call it. `limit`: bytes of all models in `root`. Raises
        InputError for a folder that others can enter, OSError if it can't be written."""
        self._root = private_folder(root)
        self._folder = private_folder(root / name)
        self._name = name
        self._limit = limit
        self._bytes = sum(size for _, size, _ in _files(self._root))
        write_private(self._folder / _LABEL, msgspec.json.encode(_Label(model)))

    def missing(self, tokens: Sequence[int]) -> list[tuple[int, Path]]:
        """Places and files of the chunks that are not kept yet. The others count as used now."""
        return [(place, file) for place, file in enumerate(self._files(tokens)) if not _touched(file)]

    def write(self, file: Path, arena: Arena, place: int) -> None:
        """Keep the chunk at `place` of an arena's tokens. Raises OSError."""
        rows = slice(place * CHUNK, (place + 1) * CHUNK)
        layout = replace(arena.layout, capacity=CHUNK)
        keys, values = (np.ascontiguousarray(half[:, :, rows]) for half in (arena.keys, arena.values))
        checksum = ArenaChecksum().extend(keys, values, CHUNK)
        header = encode_header(ArenaHeader(layout, 0, arena.model, CHUNK, checksum)).ljust(HEADER_BYTES, b"\0")
        write_private(file, b"".join((header, keys.tobytes(), values.tobytes())))
        self._bytes += layout.segment_bytes
        if self._bytes > self._limit:
            self._remove_oldest()

    def kept(self, tokens: Sequence[int]) -> list[Path]:
        """Files of the chunks with which `tokens` begin, as far as they are kept."""
        found = []
        for file in self._files(tokens):
            if not file.is_file():
                break
            found.append(file)
        return found

    def read(self, file: Path, arena: Arena, place: int) -> None:
        """Copy a chunk into an arena's rows. Raises ArenaError for a file that does not fit; it is removed."""
        try:
            content = read_private(file)
            if content is None:
                raise ArenaMismatch(f"{file} has been removed.")
            keys, values = _checked(content, arena)
        except (ArenaError, InputError) as error:
            with suppress(OSError):
                file.unlink()
            raise ArenaDamaged(f"{file} is not used: {error}") from error
        arena.write_rows(place * CHUNK, list(keys), list(values))
        _touched(file)

    def _files(self, tokens: Sequence[int]) -> Iterator[Path]:
        return (self._folder / f"{name}{_SUFFIX}" for name in chunk_names(self._name, tokens))

    def _remove_oldest(self) -> None:
        files = sorted(_files(self._root), key=lambda file: file[2])
        self._bytes = sum(size for _, size, _ in files)
        for file, size, _ in files:
            if self._bytes <= _LEFT * self._limit:
                return
            with suppress(OSError):
                file.unlink()
                self._bytes -= size


def disk_cache_folder() -> Path:
    return cache_folder() / "prefixes"


def cached_models() -> list[CachedModel]:
    """What the disk cache holds, the model that was used last first."""
    found = []
    for folder in _folders(disk_cache_folder()):
        files = list(_chunk_files(folder))
        used = max((when for *_, when in files), default=0.0)
        found.append(CachedModel(folder, _label(folder), len(files), sum(size for _, size, _ in files), used))
    return sorted(found, key=lambda model: -model.used)


def clear_disk_cache() -> int:
    """Remove all of it; the number of bytes. A server that is at work goes on and keeps new turns."""
    removed = sum(model.bytes for model in cached_models())
    shutil.rmtree(disk_cache_folder(), ignore_errors=True)
    return removed


def _checked(content: bytes, arena: Arena) -> tuple[np.ndarray, np.ndarray]:
    header = decode_header(content[:HEADER_BYTES], len(content))
    if header.layout != replace(arena.layout, capacity=CHUNK) or header.model != arena.model:
        raise ArenaMismatch("it was written by another model.")
    count = header.layout.half_bytes // header.layout.dtype.size
    flat = np.frombuffer(content, header.layout.dtype.numpy_name, 2 * count, HEADER_BYTES)
    keys, values = flat.reshape(2, *header.layout.shape)
    if ArenaChecksum().extend(keys, values, CHUNK) != header.checksum:
        raise ArenaDamaged("it is torn (its checksum is wrong).")
    return keys, values


def _touched(file: Path) -> bool:
    """Mark as used now; whether the file is there."""
    try:
        now = time.time()
        os.utime(file, (now, now), follow_symlinks=False)
    except OSError:
        return False
    return True


def _files(root: Path) -> Iterator[tuple[Path, int, float]]:
    for folder in _folders(root):
        yield from _chunk_files(folder)


def _folders(root: Path) -> list[Path]:
    try:
        return [entry for entry in root.iterdir() if entry.is_dir() and not entry.is_symlink()]
    except OSError:
        return []


def _chunk_files(folder: Path) -> Iterator[tuple[Path, int, float]]:
    """Each file with its bytes and the time of its last use; also what a killed process left unfinished."""
    with suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name != _LABEL:
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    yield Path(entry.path), status.st_size, status.st_mtime


def _label(folder: Path) -> str:
    try:
        return msgspec.json.decode((folder / _LABEL).read_bytes(), type=_Label).model
    except (OSError, msgspec.MsgspecError):
        return ""
