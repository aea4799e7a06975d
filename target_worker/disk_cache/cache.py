"""Keeps the KV of ended sequences on disk, and takes it up, between a target's other work. Computing is the caller's
turn; threads read and write. Knows no messages.

Whatever fails costs a prefill, and no token.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple, TypeVar

from protocol.errors import InputError
from protocol.inference.device import compute
from protocol.inference.tree_sequence import TreeSequence
from protocol.kv.cache_files import CacheFiles, disk_cache_folder, touched
from protocol.messages.base import RequestId
from target_worker.disk_cache.kept_prefixes import LEAST_TOKENS, DiskReading, KeptPrefixes, Piece, parts_name, sealed
from target_worker.disk_cache.snapshot import CHUNK, CacheShape, FilePart, Snapshot, WindowChunk, resting_places, resume
from target_worker.engine import TargetSequence

log = logging.getLogger(__name__)

_Key = TypeVar("_Key", int, WindowChunk)

_MOST_WAITING = 1
"""Files that wait to be written."""
_MOST_COPIED = 256 << 20
"""Bytes of a turn that are copied when its sequence goes on."""
_LAST_SECONDS = 1.5
"""For turns that are not in files yet when the process ends."""
_PAUSE_SECONDS = 0.01
_LOOKING_SECONDS = 0.5
"""For the question which files of a turn are there, for which the caller waits. A disk that is slower keeps fewer."""


class _Turn(NamedTuple):
    """A sequence whose arrays are held until they are in files."""

    memory: int
    """Bytes."""
    parts: Iterator[tuple[Path, FilePart]]
    sequence: TreeSequence | None
    """Whose arrays they are; None if they are copies."""


class DiskCache:
    """The disk cache of one model in one process."""

    def __init__(self, fingerprint: str, device: str, model: str, shape: CacheShape, limit: int, waiting: int) -> None:
        """`fingerprint`: of the weights and the form of KV. `model`: what users call it. `shape`: of its sequences.
        `limit`: bytes of all models on disk. `waiting`: bytes of the turns that wait to be written; one turn may always
        wait, and a disk that is too slow for more keeps fewer. A folder that can't be used turns it off."""
        self._shape = shape
        self._most_waiting = waiting
        self._turns: deque[_Turn] = deque()
        self._kept: KeptPrefixes | None = None
        self._off = ""
        """Why it is off, until that is told."""
        self._written: queue.SimpleQueue[tuple[Path, list[Piece]] | None] = queue.SimpleQueue()
        self._asked: queue.SimpleQueue[DiskReading | None] = queue.SimpleQueue()
        self._reading: DiskReading | None = None
        """What the disk is at work on."""
        self._looking: threading.Thread | None = None
        self._writer = threading.Thread(target=self._write, daemon=True, name="disk cache, writing")
        self._reader = threading.Thread(target=self._read, daemon=True, name="disk cache, reading")
        name = parts_name(fingerprint, device)
        try:
            self._kept = KeptPrefixes(CacheFiles(disk_cache_folder(), name, model, limit), name, shape)
        except (InputError, OSError) as error:
            self._disable(str(error))
        self._writer.start()
        self._reader.start()

    @property
    def waits(self) -> bool:
        """Whether `step` has something to do, for which the disk is quick enough."""
        return bool(self._turns) and self._written.qsize() < _MOST_WAITING

    def keep(self, sequence: TreeSequence, tokens: Sequence[int]) -> None:
        """Keep what the sequence has of `tokens`; it goes on freely."""
        kept, held = self._kept, tokens[: sequence.committed]
        waiting, memory = sum(turn.memory for turn in self._turns), sequence.memory
        if kept is None or len(held) < LEAST_TOKENS or (waiting and waiting + memory > self._most_waiting):
            return
        places = [place for place in resting_places(sequence) if place >= LEAST_TOKENS and kept.needs_rest(place)]
        wanted = _Files(kept.chunks(held), kept.window_chunks(held, places), kept.rests(held, places))
        looked = self._missing_of(wanted, lambda: kept.remove_outgrown(held))
        if looked is None:
            return
        chunks = {end - CHUNK: file for end, file in looked.chunks.items()}
        first = min([len(held), *chunks, *(place - place % CHUNK for place in looked.rests)])
        if chunks or looked.windows or looked.rests:
            snapshot = Snapshot(sequence, first, looked.rests, looked.windows)
            self._turns.append(_Turn(memory, _parts(snapshot, looked._replace(chunks=chunks)), sequence))

    def settle(self, sequence: TreeSequence) -> None:
        """Call it before the sequence goes on: forwards write in place to arrays that turns hold. The next files of
        these get copies of their own; the others are kept after the next turn."""
        for place, turn in enumerate(self._turns):
            if turn.sequence is sequence:
                copied = list(_copied(turn.parts, _MOST_COPIED))
                self._turns[place] = _Turn(sum(part.size for _, part in copied), iter(copied), None)

    def step(self) -> None:
        """Compute the contents of the next file."""
        part = None if self._kept is None else next(self._turns[0].parts, None)
        if part is None:
            self._turns.popleft()
            return
        file, content = part
        self._written.put((file, content.encoded()))

    def read(self, tokens: Sequence[int], beyond: int) -> DiskReading | None:
        """Begin to read what is kept of the first of `tokens`, for a sequence that has `beyond` of them. None if that
        can't help, or if the disk hangs."""
        busy = self._reading
        hangs = busy is not None and busy.given_up
        if self._kept is None or hangs or len(tokens) < beyond + LEAST_TOKENS:
            return None
        reading = DiskReading(tokens, beyond)
        self._asked.put(reading)
        return reading

    def resume(self, sequence: TreeSequence, reading: DiskReading) -> int:
        """Let the empty sequence hold what was read; its tokens, 0 if it stays empty."""
        found, reading.contents = reading.contents, None
        if found is None:
            return 0
        rest = FilePart({}, {}) if found.rest is None else FilePart.decoded(found.rest)
        chunks, windows = _decoded(found.chunks), _decoded([content for _, content in found.windows])
        placed = zip([chunk for chunk, _ in found.windows], windows, strict=True)
        found.windows.clear()
        resume(sequence, reading.tokens[: found.tokens], chunks, placed, rest)
        return found.tokens

    @property
    def off(self) -> bool:
        """Whether it was turned off since the last `turned_off`."""
        return bool(self._off)

    def turned_off(self) -> str:
        """Why it was turned off since the last call."""
        reason, self._off = self._off, ""
        return reason

    def close(self) -> None:
        """Finish the turns that wait, for some seconds."""
        ends_at = monotonic() + _LAST_SECONDS
        while self._turns and monotonic() < ends_at:
            if self.waits:
                self.step()
            else:
                sleep(_PAUSE_SECONDS)
        self._written.put(None)
        self._asked.put(None)
        for thread in (self._writer, self._reader):
            thread.join(max(0.0, ends_at - monotonic()))

    def _missing_of(self, wanted: "_Files", behind: Callable[[], None]) -> "_Files | None":
        """Those that are not there; the others count as used now. None if the disk is too slow to tell. `behind` is
        called once that is known."""
        if self._looking is not None and self._looking.is_alive():
            return None
        found: queue.SimpleQueue[_Files] = queue.SimpleQueue()

        def look() -> None:
            found.put(_Files(_missing(wanted.chunks), _missing(wanted.windows), _missing(wanted.rests)))
            behind()

        self._looking = threading.Thread(target=look, daemon=True, name="disk cache, looking")
        self._looking.start()
        try:
            return found.get(timeout=_LOOKING_SECONDS)
        except queue.Empty:
            return None

    def _read(self) -> None:
        while (reading := self._asked.get()) is not None:
            self._reading, kept = reading, self._kept
            if kept is not None:
                try:
                    kept.read(reading)
                except OSError as error:
                    self._disable(_reason(error))
            self._reading = None
            reading.end()

    def _write(self) -> None:
        while (waiting := self._written.get()) is not None:
            self._write_file(*waiting)
            # Nothing is held while the next file is waited for.
            del waiting

    def _write_file(self, file: Path, pieces: list[Piece]) -> None:
        if self._kept is None:
            return
        try:
            self._kept.files.write(file, sealed(file.name, pieces))
        except (InputError, OSError) as error:
            self._disable(_reason(error))

    def _disable(self, reason: str) -> None:
        self._kept = None
        self._off = reason
        log.warning("the disk cache is off: %s", reason)


def _reason(error: InputError | OSError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class _Files(NamedTuple):
    """Of one turn."""

    chunks: dict[int, Path]
    windows: dict[WindowChunk, Path]
    rests: dict[int, Path]


def _missing(files: dict[_Key, Path]) -> dict[_Key, Path]:
    return {place: file for place, file in files.items() if not touched(file)}


def _decoded(contents: list[bytes]) -> Iterator[FilePart]:
    """Contents of files, each of which is let go once it is decoded."""
    contents.reverse()
    while contents:
        yield FilePart.decoded(contents.pop())


def _copied(parts: Iterator[tuple[Path, FilePart]], most: int) -> Iterator[tuple[Path, FilePart]]:
    """Computed parts, of so many bytes at most or one."""
    taken = 0
    for file, part in parts:
        taken += part.size
        if taken > most > 0 and taken > part.size:
            return
        compute(part.arrays)
        yield file, part


def _parts(snapshot: Snapshot, files: _Files) -> Iterator[tuple[Path, FilePart]]:
    """A place can be taken up once its last part is there: the last place first, where a conversation goes on."""
    for begin, file in files.chunks.items():
        yield file, snapshot.chunk(begin)
    for chunk, file in files.windows.items():
        yield file, snapshot.window_chunk(chunk)
    for place, file in reversed(files.rests.items()):
        yield file, snapshot.behind(place)


_READING_SECONDS = 10.0
"""Until a prompt is prefilled although it has not been read."""
_GLANCE_SECONDS = 0.001
"""Between two looks at a disk for which alone the target waits. A message that arrives meanwhile waits as long."""


class _Waiting(NamedTuple):
    sequence: TargetSequence
    reading: DiskReading
    began: float


class DiskWork:
    """Without a disk cache there is no work."""

    def __init__(self, disk: DiskCache | None, empty: Callable[[], TreeSequence], clock: Callable[[], float]) -> None:
        """`empty`: makes an empty sequence."""
        self._disk = disk
        self._empty = empty
        self._clock = clock
        self._waiting: dict[RequestId, _Waiting] = {}
        self._turn = False
        """The last unit of work was the disk's."""

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or (self._disk is not None and (self._disk.waits or self._disk.off))

    def read(self, sequence: TargetSequence) -> None:
        """Look for more of a new sequence's tokens than it has; it is not to be prefilled until `due` names it."""
        if self._disk is None:
            return
        reading = self._disk.read(sequence.prefix, sequence.prefilled)
        if reading is not None:
            self._waiting[sequence.start.request] = _Waiting(sequence, reading, self._clock())

    def reads(self, id: RequestId) -> bool:
        return id in self._waiting

    def discard(self, id: RequestId) -> None:
        waiting = self._waiting.pop(id, None)
        if waiting is not None:
            waiting.reading.give_up()

    def due(self) -> RequestId | None:
        """A sequence that waits no longer, because its files are read or late. `take_up` is to follow."""
        now = self._clock()
        for id, waiting in self._waiting.items():
            if waiting.reading.ended or now - waiting.began >= _READING_SECONDS:
                return id
        return None

    def take_up(self, id: RequestId) -> None:
        """Let the sequence begin with what was read."""
        sequence, reading, began = self._waiting.pop(id)
        assert self._disk is not None
        if not reading.ended:
            reading.give_up()
            sequence.warning = f"The disk cache took more than {_READING_SECONDS:.0f} s: its KV is not used."
            return
        sequence.warning = reading.warning
        cache = self._empty()
        if self._disk.resume(cache, reading):
            sequence.begin_with(cache)
            sequence.seconds = self._clock() - began

    def wait(self) -> None:
        """Shortly, for the files of the sequence that waits longest."""
        for waiting in islice(self._waiting.values(), 1):
            waiting.reading.wait(_GLANCE_SECONDS)

    def takes_turn(self, others: bool) -> bool:
        """Compute what the next file holds, unless `others` have work and it is their turn. Whether it was done."""
        self._turn = not self._turn or not others
        if not self._turn or self._disk is None or not self._disk.waits:
            return False
        self._disk.step()
        return True

    def turned_off(self) -> str:
        """Why the disk cache was turned off since the last call; empty if it was not."""
        return "" if self._disk is None else self._disk.turned_off()

    def settle(self, cache: TreeSequence) -> None:
        """Another sequence goes on with this KV of one that ended."""
        if self._disk is not None:
            self._disk.settle(cache)

    def keep(self, sequence: TargetSequence) -> None:
        """Keep an ended sequence."""
        if self._disk is not None:
            self._disk.keep(sequence.cache, sequence.prefix)
