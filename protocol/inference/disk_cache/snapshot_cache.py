"""Keeps the KV of ended sequences on disk, and takes it up. Computing is the caller's turn; a thread writes.

Whatever fails costs a prefill, and no token.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from protocol.errors import InputError
from protocol.inference.disk_cache.part_files import PartDamaged, decoded, encoded, parts_name, prefix_names, sealed
from protocol.inference.disk_cache.snapshot import CHUNK, Part, Shape, Snapshot, resting_places, resume
from protocol.inference.tree_sequence import TreeSequence
from protocol.kv.cache_files import CacheFiles, disk_cache_folder, touched
from protocol.security.private_files import read_private

log = logging.getLogger(__name__)

LEAST_TOKENS = 256
"""Fewest tokens that are kept, or for which the disk is read."""
_MOST_TURNS = 4
"""Whose arrays are held until they are in files. A disk that is too slow for more keeps fewer."""
_MOST_WAITING = 4
"""Files that wait to be written."""
_LAST_SECONDS = 1.5
"""For turns that are not in files yet when the process ends."""
_PAUSE_SECONDS = 0.01
_TRIES = 4
"""Damaged files after which a prompt is prefilled."""


class Resumed(NamedTuple):
    """What was found on disk."""

    tokens: int
    """That the sequence holds now; 0 if it is still empty."""
    warning: str = ""


class SnapshotCache:
    """The disk cache of one model in one process."""

    def __init__(self, fingerprint: str, device: str, model: str, shape: Shape, limit: int) -> None:
        """`fingerprint`: of the weights and the form of KV. `model`: what users call it. `shape`: of its sequences.
        `limit`: bytes of all models on disk. A folder that can't be used turns it off, with a warning."""
        self._name = parts_name(fingerprint, device)
        self._shape = shape
        self._jobs: deque[Iterator[tuple[Path, Part]]] = deque()
        self._files: CacheFiles | None = None
        self._off = ""
        """Why it is off, until that is told."""
        self._written: queue.SimpleQueue[tuple[Path, bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, daemon=True, name="disk cache")
        try:
            self._files = CacheFiles(disk_cache_folder(), self._name, model, limit)
        except (InputError, OSError) as error:
            self._disable(str(error))
        self._thread.start()

    @property
    def waits(self) -> bool:
        """Whether `step` has something to do, for which the disk is quick enough."""
        return bool(self._jobs) and self._written.qsize() < _MOST_WAITING

    def keep(self, sequence: TreeSequence, tokens: Sequence[int], prompt: int) -> None:
        """Keep what the sequence has of `tokens`, the first `prompt` of which are the prompt's; it goes on freely."""
        files, held = self._files, tokens[: sequence.committed]
        if files is None or len(held) < LEAST_TOKENS or len(self._jobs) >= _MOST_TURNS:
            return
        rests = self._missing_rests(files, sequence, held, prompt)
        chunks = self._missing_chunks(files, held)
        first = min([len(held), *chunks, *(place - place % CHUNK for place in rests)])
        if chunks or rests:
            self._jobs.append(self._parts(Snapshot(sequence, first, rests), chunks, rests))

    def step(self) -> None:
        """Compute the contents of the next file."""
        part = None if self._files is None else next(self._jobs[0], None)
        if part is None:
            self._jobs.popleft()
            return
        file, content = part
        self._written.put((file, encoded(content)))

    def resume(self, sequence: TreeSequence, tokens: Sequence[int], beyond: int) -> Resumed:
        """Let the empty sequence hold as many of the first of `tokens` as are kept, if these are LEAST_TOKENS more than
        `beyond`."""
        warning, self._off = self._off, ""
        if self._files is None:
            return Resumed(0, warning)
        for _ in range(_TRIES):
            place, chunks, rest = self._longest(self._files, tokens)
            if place < beyond + LEAST_TOKENS:
                break
            try:
                parts = [_read(file) for file in (*chunks, *rest)]
            except (PartDamaged, OSError) as error:
                log.warning("%s", error)
                warning = str(error)
                continue
            resume(sequence, tokens[:place], parts[: len(chunks)], parts[-1] if rest else Part({}, {}))
            return Resumed(place, warning)
        return Resumed(0, warning)

    def close(self) -> None:
        """Finish the turns that wait, for some seconds."""
        ends_at = monotonic() + _LAST_SECONDS
        while self._jobs and monotonic() < ends_at:
            if self.waits:
                self.step()
            else:
                sleep(_PAUSE_SECONDS)
        self._written.put(None)
        self._thread.join(max(0.0, ends_at - monotonic()))

    def _missing_chunks(self, files: CacheFiles, tokens: Sequence[int]) -> dict[int, Path]:
        """By first token. The others count as used now."""
        if not self._shape.rows:
            return {}
        named = self._chunk_files(files, tokens)
        return {place - CHUNK: file for place, file in named.items() if not touched(file)}

    def _missing_rests(
        self, files: CacheFiles, sequence: TreeSequence, tokens: Sequence[int], prompt: int
    ) -> dict[int, Path]:
        """By tokens. The others count as used now."""
        if not self._shape.states:
            return {}
        places = [place for place in resting_places(sequence, prompt) if place >= LEAST_TOKENS]
        names = prefix_names(self._name, tokens, places)
        named = {place: files.folder / f"{place}-{name}.state" for place, name in names.items()}
        return {place: file for place, file in named.items() if not touched(file)}

    def _chunk_files(self, files: CacheFiles, tokens: Sequence[int]) -> dict[int, Path]:
        """By the tokens up to the chunk's end."""
        names = prefix_names(self._name, tokens, range(CHUNK, len(tokens) + 1, CHUNK))
        return {place: files.folder / f"{name}.rows" for place, name in names.items()}

    def _longest(self, files: CacheFiles, tokens: Sequence[int]) -> tuple[int, list[Path], list[Path]]:
        """Of the prefixes that are kept: its tokens, the files of its whole chunks, and that of what is behind them."""
        chunks: list[Path] = []
        for file in self._chunk_files(files, tokens).values() if self._shape.rows else ():
            if not file.is_file():
                break
            chunks.append(file)
        if not self._shape.states:
            return len(chunks) * CHUNK, chunks, []
        whole = len(chunks) * CHUNK + CHUNK - 1 if self._shape.rows else len(tokens)
        kept = {file.name: int(file.name.split("-")[0]) for file in files.folder.glob("[1-9]*-*.state")}
        places = sorted({place for place in kept.values() if place <= min(len(tokens), whole)})
        for place, name in reversed(prefix_names(self._name, tokens, places).items()):
            if f"{place}-{name}.state" in kept:
                used = chunks[: place // CHUNK] if self._shape.rows else []
                return place, used, [files.folder / f"{place}-{name}.state"]
        return 0, [], []

    @staticmethod
    def _parts(snapshot: Snapshot, chunks: dict[int, Path], rests: dict[int, Path]) -> Iterator[tuple[Path, Part]]:
        for begin, file in chunks.items():
            yield file, snapshot.chunk(begin)
        for place, file in rests.items():
            yield file, snapshot.behind(place)

    def _write(self) -> None:
        while (waiting := self._written.get()) is not None:
            file, content = waiting
            if self._files is None:
                continue
            try:
                self._files.write(file, sealed(file.name, content))
            except (InputError, OSError) as error:
                self._disable((error.strerror if isinstance(error, OSError) else None) or str(error))

    def _disable(self, reason: str) -> None:
        self._files = None
        self._off = f"The disk cache is off until the next start: {reason}"
        log.warning("%s", self._off)


def _read(file: Path) -> Part:
    """Raises PartDamaged for a file that can't be used, which is removed, or OSError."""
    try:
        content = read_private(file)
        if content is None:
            raise PartDamaged("it has been removed.")
        part = decoded(file.name, content)
    except (InputError, PartDamaged) as error:
        with suppress(OSError):
            file.unlink()
        raise PartDamaged(f"The file {file} of the disk cache is not used: {error}") from error
    touched(file)
    return part
