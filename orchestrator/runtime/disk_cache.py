"""The thread that copies arenas to the disk cache and back, beside the loop. Knows no requests."""

import importlib.metadata
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple, TypeVar

import structlog

from orchestrator.core.commands import Keep, Recall
from orchestrator.core.events import Recalled
from orchestrator.machine.disk_cache.chunks import CHUNK, model_name
from orchestrator.machine.disk_cache.store import ChunkStore, disk_cache_folder
from orchestrator.runtime.notices import Notice, NoticeSender
from protocol.errors import InputError
from protocol.kv.arena import Arena
from protocol.kv.arena_header import ArenaError, ArenaLayout, ElementType, model_key
from protocol.kv.segments import SegmentError
from protocol.messages.kv import KvOffer
from protocol.messages.worker import Hello

log = structlog.get_logger()

_Job = TypeVar("_Job")
_LAST_SECONDS = 3.0
"""For turns that are not on disk yet when the pipeline ends."""


class _Keeping(NamedTuple):
    """An arena that is copied to files."""

    size: int
    """Bytes."""
    steps: Iterator[None]
    """Each copies a chunk, so that a Recall waits for one at most."""


class DiskCache:
    """Answers each Recall with one Recalled. `fileno` is readable when there are answers."""

    def __init__(self, limit: int, arena_limit: int, epoch: int, notices: NoticeSender) -> None:
        """`limit`: bytes on disk; `arena_limit`: bytes of one arena, and of all that wait to be copied. `notices` tells
        the user why it is off."""
        self.warnings = 0
        """How often it was turned off."""
        self._notices = notices
        self._limit = limit
        self._arena_limit = arena_limit
        self._epoch = epoch
        self._target: Hello | None = None
        self._store: ChunkStore | None = None
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._answers: deque[Recalled] = deque()
        self._recalls: deque[Recall] = deque()
        self._keeping: deque[_Keeping] = deque()
        self._changed = threading.Condition()
        self._ends_at: float | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="disk cache")
        self._thread.start()

    def fileno(self) -> int:
        return self._reader

    def set_target(self, target: Hello) -> None:
        """A target of this machine is up."""
        if target.keeps_kv:
            # It reads and writes its files itself.
            return
        if target.kv is None:
            self._disable(f"{target.model} has keys and values that shared memory does not hold")
            return
        layout = self._layout(target, CHUNK)
        computed_by = f"{importlib.metadata.version('mlx')} {target.device}"
        name = model_name(model_key(target.model_fingerprint), layout, computed_by)
        try:
            store = ChunkStore(disk_cache_folder(), name, target.model, self._limit)
        except (InputError, OSError) as error:
            self._disable(str(error))
            return
        with self._changed:
            self._target, self._store = target, store

    def turned_off(self, reason: str) -> None:
        """It keeps and finds nothing until the target starts again; or that of a target that has its own files does."""
        self.warnings += 1
        log.warning("the disk cache is off: requests go on without it", reason=reason)
        text = f"The disk cache is off until the next start: {reason.rstrip('.')}. Requests go on without it."
        self._notices.send(Notice(text, "warning"))

    def keep(self, command: Keep) -> None:
        """Its arena may be unlinked at once: the memory stays until it is copied. A disk that is too slow for all turns
        keeps fewer."""
        if self._store is None:
            return
        with suppress(ArenaError, SegmentError):
            arena = Arena.attach(command.name)
            size = arena.layout.segment_bytes
            if size + sum(waiting.size for waiting in list(self._keeping)) > self._arena_limit:
                arena.close()
                return
            self._put(self._keeping, _Keeping(size, self._copied(self._store, arena, command.tokens)))

    def recall(self, command: Recall) -> None:
        self._put(self._recalls, command)

    def receive(self) -> list[Recalled]:
        """The answers since the last call."""
        os.read(self._reader, 1 << 12)
        found = []
        while self._answers:
            found.append(self._answers.popleft())
        return found

    def close(self) -> None:
        """Finish the turns that wait, for some seconds."""
        with self._changed:
            self._ends_at = monotonic() + _LAST_SECONDS
            self._changed.notify()
        self._thread.join(_LAST_SECONDS + 1.0)
        os.close(self._reader)
        os.close(self._writer)
        self._notices.close()

    def _put(self, queue: deque[_Job], job: _Job) -> None:
        with self._changed:
            queue.append(job)
            self._changed.notify()

    def _run(self) -> None:
        while self._wait():
            if self._recalls:
                command = self._recalls.popleft()
                self._answers.append(self._recalled(command))
                with suppress(OSError):
                    os.write(self._writer, b".")
            elif self._keeping:
                job = self._keeping.popleft()
                if next(job.steps, self) is not self:
                    self._keeping.appendleft(job)

    def _wait(self) -> bool:
        """Until there is work. Whether to go on."""
        with self._changed:
            while not self._recalls and not self._keeping and self._ends_at is None:
                self._changed.wait()
        if self._ends_at is None:
            return True
        return bool(self._keeping) and monotonic() < self._ends_at

    def _copied(self, store: ChunkStore, arena: Arena, tokens: tuple[int, ...]) -> Iterator[None]:
        """Keeps a chunk in each step."""
        try:
            for place, file in store.missing(tokens):
                store.write(file, arena, place)
                yield
        except (InputError, OSError) as error:
            self._disable(_reason(error))
        finally:
            arena.close()

    def _recalled(self, command: Recall) -> Recalled:
        try:
            return self._found(command)
        except OSError as error:
            self._disable(_reason(error))
            return Recalled(command.sequence, None)

    def _found(self, command: Recall) -> Recalled:
        """Raises OSError if the disk fails."""
        store, target = self._store, self._target
        if store is None or target is None:
            return Recalled(command.sequence, None)
        began = monotonic()
        kept = store.kept(command.tokens)
        layout = self._layout(target, max(1, len(kept)) * CHUNK)
        if len(kept) * CHUNK - command.beyond < CHUNK or layout.segment_bytes > self._arena_limit:
            return Recalled(command.sequence, None)
        try:
            arena = Arena.create(layout, fingerprint=target.model_fingerprint, epoch=self._epoch)
        except SegmentError as error:
            log.warning("the disk cache is not read", reason=str(error))
            return Recalled(command.sequence, None)
        try:
            read, damaged = self._read(store, kept, arena)
        except OSError:
            arena.unlink()
            raise
        finally:
            arena.close()
        if read - command.beyond < CHUNK:
            arena.unlink()
            return Recalled(command.sequence, None, damaged)
        offer = KvOffer(command.sequence, arena.name, read, layout.segment_bytes, monotonic() - began)
        return Recalled(command.sequence, offer, damaged)

    def _read(self, store: ChunkStore, kept: Sequence[Path], arena: Arena) -> tuple[int, int]:
        """Tokens that the arena holds now, and the number of damaged files. Raises OSError if the disk fails."""
        read, damaged = 0, 0
        for place, file in enumerate(kept):
            try:
                store.read(file, arena, place)
            except ArenaError as error:
                log.warning("a file of the disk cache is damaged", reason=str(error))
                damaged = 1
                break
            read += CHUNK
        arena.commit(read)
        return read, damaged

    def _disable(self, reason: str) -> None:
        """Until another target is up."""
        with self._changed:
            self._store = None
            self._keeping.clear()
        self.turned_off(reason)

    def _layout(self, target: Hello, tokens: int) -> ArenaLayout:
        form = target.kv
        assert form is not None
        return ArenaLayout(form.layers, form.kv_heads, tokens, form.head_size, ElementType(form.element))


def _reason(error: InputError | OSError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
