"""Laws of the disk cache's thread: each Recall is answered, and a failing disk ends nothing but the cache."""

import errno
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from orchestrator.core.commands import Keep, Recall
from orchestrator.core.events import Recalled
from orchestrator.lab.simulate.workers import modelled_hello
from orchestrator.machine.disk_cache.chunks import CHUNK
from orchestrator.machine.disk_cache.store import ChunkStore, cached_models, clear_disk_cache, disk_cache_folder
from orchestrator.runtime.disk_cache import DiskCache
from orchestrator.runtime.notices import Notice, NoticeSender, received
from protocol.kv.arena import Arena
from protocol.kv.segment_registry import owned
from protocol.kv.segments import unlink_owned
from protocol.messages.base import SequenceId
from protocol.messages.kv import KvForm
from tests.orchestrator.machine.disk_cache.test_store import LAYOUT, TOKENS, written
from tests.support.processes import until

ONE = SequenceId(1)
FORM = KvForm(LAYOUT.layers, LAYOUT.kv_heads, LAYOUT.head_size, int(LAYOUT.dtype))
TARGET = replace(modelled_hello("target"), kv=FORM, model_fingerprint="m")


Lives = tuple[socket.socket, socket.socket]


@pytest.fixture
def lives() -> Iterator[Lives]:
    """The user's end, and the orchestrator's."""
    user, life = socket.socketpair()
    with user, life:
        yield user, life


def opened(arena_limit: int = 1 << 30, life: socket.socket | None = None) -> DiskCache:
    return DiskCache(1 << 30, arena_limit, 5, NoticeSender(None if life is None else life.fileno()))


def told(lives: Lives) -> list[Notice]:
    """What the user was told until now."""
    lives[1].shutdown(socket.SHUT_WR)
    return list(received(lives[0]))


@pytest.fixture
def cache(lives: Lives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskCache]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    made = opened(life=lives[1])
    yield made
    made.close()
    unlink_owned()


def recalled(cache: DiskCache, beyond: int = 0) -> Recalled:
    cache.recall(Recall(ONE, TOKENS, beyond))
    assert select.select([cache], [], [], 20.0)[0]
    (answer,) = cache.receive()
    return answer


def all_kept(cache: DiskCache) -> list[Path]:
    """The files of all tokens, once they are written."""
    assert cache._store is not None
    found = cache._store.kept(TOKENS)
    return found if len(found) == 3 else []


def keep(cache: DiskCache, tokens: tuple[int, ...] = TOKENS) -> None:
    arena = written()
    cache.keep(Keep(arena.name, tokens))
    arena.close()
    arena.unlink()


def test_a_turn_is_kept_although_its_arena_is_unlinked_at_once_and_comes_back(cache: DiskCache):
    cache.set_target(TARGET)
    keep(cache)
    until(lambda: all_kept(cache))

    answer = recalled(cache)

    assert answer.offer is not None
    assert (answer.sequence, answer.offer.tokens, answer.damaged) == (ONE, 3 * CHUNK, 0)
    layout = LAYOUT.__class__(LAYOUT.layers, LAYOUT.kv_heads, 3 * CHUNK, LAYOUT.head_size, LAYOUT.dtype)
    Arena.adopt(answer.offer.name, layout, fingerprint="m", epoch=5, tokens=3 * CHUNK).close()
    assert recalled(cache, beyond=2 * CHUNK).offer is not None
    assert recalled(cache, beyond=2 * CHUNK + 1).offer is None


def test_the_end_waits_for_turns_that_are_being_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    cache = opened()
    cache.set_target(TARGET)
    keep(cache)
    cache.close()

    assert cached_models()[0].chunks == 3


@pytest.mark.parametrize("kv", [None, replace(FORM, layers=1)], ids=["no target yet", "another form"])
def test_what_can_not_be_found_is_answered_too(cache: DiskCache, kv: KvForm | None):
    if kv is not None:
        cache.set_target(replace(TARGET, kv=kv))

    assert recalled(cache) == Recalled(ONE, None)


def test_a_target_without_kv_in_shared_memory_turns_it_off(cache: DiskCache):
    with capture_logs() as logged:
        cache.set_target(replace(TARGET, kv=None))
        keep(cache)

    assert recalled(cache) == Recalled(ONE, None)
    assert [line["log_level"] for line in logged] == ["warning"]


def test_a_target_that_keeps_its_kv_itself_is_left_alone(cache: DiskCache):
    with capture_logs() as logged:
        cache.set_target(replace(TARGET, kv=None, keeps_kv=True))
        keep(cache)

    assert recalled(cache) == Recalled(ONE, None)
    assert logged == []


def test_a_full_disk_turns_it_off_with_one_warning(cache: DiskCache, lives: Lives, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ChunkStore, "write", full)
    cache.set_target(TARGET)
    with capture_logs() as logged:
        keep(cache)
        keep(cache)
        until(lambda: logged)
        assert recalled(cache) == Recalled(ONE, None)

    assert [line["reason"] for line in logged] == ["No space left on device"]
    assert cache.warnings == 1
    off = "The disk cache is off until the next start: No space left on device. Requests go on without it."
    assert told(lives) == [Notice(off, "warning")]


def test_the_user_is_told_of_a_folder_that_others_can_enter(cache: DiskCache, lives: Lives):
    disk_cache_folder().mkdir(parents=True, mode=0o755)
    cache.set_target(TARGET)

    (notice,) = told(lives)
    assert "chmod 700" in notice.text
    assert cache.warnings == 1


def test_a_damaged_chunk_ends_what_is_read_and_is_counted(cache: DiskCache):
    cache.set_target(TARGET)
    keep(cache)
    last = until(lambda: all_kept(cache))[2]
    last.write_bytes(last.read_bytes()[:-3])

    answer = recalled(cache)

    assert answer.offer is not None
    assert (answer.offer.tokens, answer.damaged) == (2 * CHUNK, 1)


def test_turns_are_kept_after_the_cache_was_cleared(cache: DiskCache):
    cache.set_target(TARGET)
    keep(cache)
    until(lambda: all_kept(cache))
    label = cached_models()[0].model
    clear_disk_cache()

    keep(cache)
    until(lambda: all_kept(cache))

    assert cached_models()[0].model == label
    assert recalled(cache).offer is not None


@pytest.mark.parametrize("method", ["kept", "read", "missing"])
def test_a_failing_disk_is_answered_and_leaves_no_arena(cache: DiskCache, monkeypatch: pytest.MonkeyPatch, method: str):
    cache.set_target(TARGET)
    keep(cache)
    until(lambda: all_kept(cache))

    def failing(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(ChunkStore, method, failing)
    with capture_logs() as logged:
        if method == "missing":
            keep(cache)
            until(lambda: logged)
        assert recalled(cache) == Recalled(ONE, None)

    assert [line["reason"] for line in logged] == ["Input/output error"]
    assert owned() == []


def test_no_more_turns_wait_than_one_arena_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    begun, go_on = threading.Event(), threading.Event()
    write = ChunkStore.write

    def slow(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(20.0)
        write(*arguments)

    monkeypatch.setattr(ChunkStore, "write", slow)
    cache = opened(2 * LAYOUT.segment_bytes)
    cache.set_target(TARGET)
    keep(cache)
    assert begun.wait(20.0)
    for first in range(1, 5):
        keep(cache, (first, *TOKENS[1:]))
    go_on.set()
    cache.close()

    assert cached_models()[0].chunks == 3 * 3
