"""The files of the disk cache: chunks of arenas, checked when read, the oldest ones removed first. Knows no threads.

Several processes may use one folder: files appear whole, are never changed, and may vanish.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from orchestrator.machine.disk_cache.chunks import CHUNK, chunk_names
from protocol.errors import InputError, PipelineError
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
from protocol.kv.cache_files import (
    CacheFiles,
    disk_cache_folder,
    files_of,
    label_of,
    model_entries,
    model_folders,
    touched,
)
from protocol.security.private_files import read_private

_SUFFIX = ".kv"
_TRIES = 3


class CachedModel(NamedTuple):
    """What is kept of one model."""

    folder: Path
    model: str
    """The model's folder or id, as it was when its KV was kept."""
    chunks: int
    bytes: int
    used: float
    """Time of the last use, in seconds since 1970."""


class ChunkStore:
    """The chunks of one model."""

    def __init__(self, root: Path, name: str, model: str, limit: int) -> None:
        """`name`: see `model_name`. `model`: what users call it. `limit`: bytes of all models in `root`. Raises
        InputError for a folder that others can enter, OSError if it can't be written."""
        self._name = name
        self._kept = CacheFiles(root, name, model, limit)

    def missing(self, tokens: Sequence[int]) -> list[tuple[int, Path]]:
        """Places and files of the chunks that are not kept yet. The others count as used now."""
        return [(place, file) for place, file in enumerate(self._files(tokens)) if not touched(file)]

    def write(self, file: Path, arena: Arena, place: int) -> None:
        """Keep the chunk at `place` of an arena's tokens. Raises OSError."""
        rows = slice(place * CHUNK, (place + 1) * CHUNK)
        layout = replace(arena.layout, capacity=CHUNK)
        keys, values = (np.ascontiguousarray(half[:, :, rows]) for half in (arena.keys, arena.values))
        checksum = ArenaChecksum().extend(keys, values, CHUNK)
        header = encode_header(ArenaHeader(layout, _mark(file), arena.model, CHUNK, checksum)).ljust(
            HEADER_BYTES, b"\0"
        )
        self._kept.write(file, b"".join((header, keys.tobytes(), values.tobytes())))

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
            keys, values = _checked(content, arena, _mark(file))
        except (ArenaError, InputError) as error:
            with suppress(OSError):
                file.unlink()
            raise ArenaDamaged(f"{file} is not used: {error}") from error
        arena.write_rows(place * CHUNK, list(keys), list(values))
        touched(file)

    def _files(self, tokens: Sequence[int]) -> Iterator[Path]:
        return (self._kept.folder / f"{name}{_SUFFIX}" for name in chunk_names(self._name, tokens))


def cached_models() -> list[CachedModel]:
    """What the disk cache holds, the model that was used last first."""
    found = []
    for folder in model_folders(disk_cache_folder()):
        files = list(files_of(folder))
        used = max((when for *_, when in files), default=0.0)
        found.append(CachedModel(folder, label_of(folder), len(files), sum(size for _, size, _ in files), used))
    return sorted(found, key=lambda model: -model.used)


def clear_disk_cache() -> int:
    """Remove all of it; the number of bytes. A server that is at work goes on and keeps new turns.

    The cache's folder may be a link, but no link in it is followed. Raises PipelineError if something is left.
    """
    root = disk_cache_folder()
    try:
        entries = model_entries(root)
    except OSError as error:
        raise PipelineError(f"{root} can't be read ({error.strerror}): remove what is in it by hand.") from error
    sizes = {model.folder: model.bytes for model in cached_models()}
    left = {entry: reason for entry in entries if (reason := _removed(entry))}
    removed = sum(size for folder, size in sizes.items() if folder not in left)
    if left:
        reasons = "; ".join(f"{entry} ({reason})" for entry, reason in left.items())
        raise PipelineError(f"{removed / 1e9:.2f} GB removed, but these are left, to be removed by hand: {reasons}.")
    return removed


def _removed(entry: Path) -> str:
    """Remove a model's folder. Why that failed; empty if it is gone."""
    if entry.is_symlink():
        return f"a link to {entry.readlink()}, which is not followed"
    for _ in range(_TRIES):
        # A server that is at work may add a file meanwhile.
        shutil.rmtree(entry, ignore_errors=True)
        if not entry.exists():
            return ""
    try:
        shutil.rmtree(entry)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _mark(file: Path) -> int:
    """In place of an epoch: of its name, so that no copy of it under another name passes for other tokens."""
    return int(file.stem[:16], 16)


def _checked(content: bytes, arena: Arena, mark: int) -> tuple[np.ndarray, np.ndarray]:
    header = decode_header(content[:HEADER_BYTES], len(content))
    if header.epoch != mark:
        raise ArenaMismatch("it was written for other tokens.")
    if header.layout != replace(arena.layout, capacity=CHUNK) or header.model != arena.model:
        raise ArenaMismatch("it was written by another model.")
    count = header.layout.half_bytes // header.layout.dtype.size
    flat = np.frombuffer(content, header.layout.dtype.numpy_name, 2 * count, HEADER_BYTES)
    keys, values = flat.reshape(2, *header.layout.shape)
    if ArenaChecksum().extend(keys, values, CHUNK) != header.checksum:
        raise ArenaDamaged("it is torn (its checksum is wrong).")
    return keys, values
