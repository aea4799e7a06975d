"""Laws of the KV arena and of shared memory: adopted rows equal the committed rows, and no crash leaks memory."""

import errno
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from protocol.kv import segments
from protocol.kv.arena import Arena
from protocol.kv.arena_header import (
    HEADER_BYTES,
    ArenaDamaged,
    ArenaLayout,
    ArenaMismatch,
    ElementType,
    decode_header,
    sealed,
)
from protocol.kv.segments import (
    SegmentError,
    create_segment,
    free_shared_memory,
    stale_segments,
    sweep,
    unlink_owned,
    unlink_segment,
)
from protocol.paths import SEGMENTS_VARIABLE, segments_folder
from tests.support.segments import child, exists

LAYOUT = ArenaLayout(layers=3, kv_heads=2, capacity=600, head_size=8, dtype=ElementType.FLOAT16)
MODEL = "a" * 64


pytestmark = pytest.mark.usefixtures("registry")


def create(layout: ArenaLayout = LAYOUT) -> Arena:
    return Arena.create(layout, fingerprint=MODEL, epoch=7)


def adopt(name: str, layout: ArenaLayout = LAYOUT, fingerprint: str = MODEL, epoch: int = 7, tokens: int = 0) -> Arena:
    return Arena.adopt(name, layout, fingerprint=fingerprint, epoch=epoch, tokens=tokens)


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((3, 2, count, 8)).astype(np.float16)


def filled(count: int) -> Arena:
    arena = create()
    arena.write_rows(0, list(rows(count, 1)), list(rows(count, 2)))
    arena.commit(count)
    return arena


def test_adopted_rows_equal_the_committed_rows():
    arena = filled(5)

    other = adopt(arena.name)

    assert other.committed == 5
    np.testing.assert_array_equal(other.keys[:, :, :5], rows(5, 1))
    np.testing.assert_array_equal(other.values[:, :, :5], rows(5, 2))


def test_a_thread_that_finds_memory_for_rows_leaves_the_interpreter_to_others():
    layout = ArenaLayout(layers=30, kv_heads=3, capacity=2000, head_size=64, dtype=ElementType.FLOAT16)

    events: list[str] = []

    class Half(np.ndarray[Any, Any]):
        def copy(self, order: Any = "C") -> NDArray[Any]:
            events.append("(")
            copied = super().copy(order)
            events.append(")")
            return copied

    def seen_in_both_halves() -> bool:
        arena = create(layout)
        arena.keys, arena.values = arena.keys.view(Half), arena.values.view(Half)
        thread = Thread(target=arena.touch, args=(0, layout.capacity))
        events.clear()
        thread.start()
        while thread.is_alive():
            events.append(".")
            time.sleep(0)
        arena.unlink()
        # A sum lets others have a look or two at its begin.
        return len(re.findall(r"\(\.{5,}\)", "".join(events))) == 2

    interval = sys.getswitchinterval()
    try:
        # Nobody takes the interpreter from a thread that keeps it.
        sys.setswitchinterval(60.0)
        # Other programs may have the cores for a while.
        assert any(seen_in_both_halves() for _ in range(50))
    finally:
        sys.setswitchinterval(interval)


def test_how_tokens_were_committed_does_not_matter():
    arena = create()
    for start, stop in [(0, 1), (1, 300), (300, 300), (300, 600)]:
        arena.write_rows(start, list(rows(600, 1)[:, :, start:stop]), list(rows(600, 2)[:, :, start:stop]))
        arena.commit(stop)
    arena.commit(200)

    np.testing.assert_array_equal(adopt(arena.name).keys[:, :, :200], rows(600, 1)[:, :, :200])


@pytest.mark.parametrize("attached", [lambda name: adopt(name, replace(LAYOUT, capacity=1), tokens=5), Arena.attach])
def test_who_adopts_or_attaches_may_append_rows_that_the_next_one_adopts(attached: Callable[[str], Arena]):
    """Without reading the rows that there are."""
    arena = attached(filled(5).name)
    arena.write_rows(5, list(rows(2, 3)), list(rows(2, 4)))
    arena.commit(7)

    other = adopt(arena.name, tokens=7)

    np.testing.assert_array_equal(other.keys[:, :, :5], rows(5, 1))
    np.testing.assert_array_equal(other.values[:, :, 5:7], rows(2, 4))


def exchanged(arena: Arena) -> None:
    arena.keys[1, 0, [3, 9]] = arena.keys[1, 0, [9, 3]]


def changed(half: str, place: tuple[int, int, int, int]) -> Callable[[Arena], None]:
    def change(arena: Arena) -> None:
        getattr(arena, half).view(np.uint16)[place] ^= 1

    return change


PLACES = [(half, place) for half in ("keys", "values") for place in ((0, 0, 0, 0), (2, 1, 499, 7))]


@pytest.mark.parametrize("harm", [exchanged, *(changed(*place) for place in PLACES)])
def test_a_row_that_changed_after_its_commit_is_refused(harm: Callable[[Arena], None]):
    arena = filled(500)
    harm(arena)

    with pytest.raises(ArenaDamaged, match="torn"):
        adopt(arena.name)


@pytest.mark.parametrize("place", range(0, 96, 5))
def test_a_flipped_bit_of_the_header_is_refused(place: int):
    arena = filled(5)
    arena._memory[place] ^= 1

    with pytest.raises(ArenaDamaged):
        adopt(arena.name)


@pytest.mark.parametrize(
    ("expected", "sentence"),
    [
        ({"layout": replace(LAYOUT, dtype=ElementType.BFLOAT16)}, "another model"),
        ({"layout": replace(LAYOUT, layers=4)}, "another model"),
        ({"layout": replace(LAYOUT, capacity=300, head_size=16)}, "another model"),
        ({"fingerprint": "b" * 64}, "another model"),
        ({"epoch": 8}, "another pipeline"),
        ({"tokens": 6}, "holds 5 tokens, 6 are wanted"),
    ],
)
def test_another_models_arena_is_refused_with_the_reason(expected: dict[str, Any], sentence: str):
    arena = filled(5)

    with pytest.raises(ArenaMismatch, match=sentence):
        adopt(arena.name, **expected)


def hostile(**fields: int) -> bytes:
    """A header with a right checksum and numbers of an attacker's choice."""
    shape = {"layers": 3, "kv_heads": 2, "capacity": 600, "head_size": 8, "dtype": 1}
    numbers = {"epoch": 7, "model": bytes(32), "committed": 0, "checksum": 0}
    layout = shape | {name: fields.pop(name) for name in shape if name in fields}
    return sealed(b"LPKVAREN", {"layout": layout, **numbers, **fields})


def test_the_hostile_header_is_otherwise_right():
    assert decode_header(hostile(), LAYOUT.segment_bytes).layout == LAYOUT


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("layers", [4, 0, 0xFFFFFFFF]),
        ("head_size", [0, 0xFFFFFFFF]),
        ("capacity", [601, 1 << 63, (1 << 64) - 1]),
        ("committed", [601, (1 << 64) - 1, -1]),
        ("dtype", [9, 3]),
    ],
)
def test_a_header_that_promises_more_than_there_is_is_refused(name: str, values: list[int]):
    for value in values:
        with pytest.raises(ArenaDamaged):
            decode_header(hostile(**{name: value}), LAYOUT.segment_bytes)


@pytest.mark.parametrize("page", [b"", b"LPKVAREN", bytes(HEADER_BYTES)])
def test_what_is_no_header_is_refused(page: bytes):
    with pytest.raises(ArenaDamaged, match="no KV arena"):
        decode_header(page, 1 << 20)


@pytest.mark.parametrize("name", ["../etc/passwd", "lp-../../../x", "", "lp-" + "g" * 20, "lp-" + "a" * 21, "psm_1"])
def test_only_names_of_launch_pipeline_are_opened(name: str):
    with pytest.raises(SegmentError, match="is no name"):
        Arena.attach(name)


def test_names_are_short_private_and_mode_0600(registry: Path):
    name, memory = create_segment(4096)

    assert len("/" + name) <= 30
    assert registry.stat().st_mode & 0o777 == 0o700
    assert len(memory) >= 4096
    if Path("/dev/shm").is_dir():
        assert (Path("/dev/shm") / name).stat().st_mode & 0o777 == 0o600


def test_a_registry_that_others_can_write_is_refused(registry: Path):
    registry.mkdir()
    registry.chmod(0o777)

    with pytest.raises(SegmentError, match="not a private folder"):
        create()
    with pytest.raises(SegmentError, match="not a private folder"):
        sweep()


def test_more_memory_than_there_is_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("protocol.kv.segments.free_shared_memory", lambda: 1 << 20)

    with pytest.raises(SegmentError, match=r"2 MiB .* are needed and 1 MiB are free"):
        create_segment(2 << 20)
    assert stale_segments() == []


def test_an_attach_that_the_system_refuses_is_a_segment_error(monkeypatch: pytest.MonkeyPatch):
    arena = create()

    def refused(*_: object) -> NoReturn:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("protocol.kv.segments.mmap.mmap", refused)

    with pytest.raises(SegmentError, match=r"can't be opened \(Invalid argument\)"):
        Arena.attach(arena.name)


def test_memory_that_can_not_be_unlinked_is_no_error(registry: Path, monkeypatch: pytest.MonkeyPatch):
    name, memory = create_segment(4096)
    memory.close()
    unlink = segments._posixshmem.shm_unlink

    def refused(_: str) -> NoReturn:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(segments._posixshmem, "shm_unlink", refused)
    unlink_segment(name)
    unlink("/" + name)

    assert list(registry.glob("*")) == []


def test_closing_waits_for_views_in_use():
    arena = filled(5)
    view = arena.keys[:, :, :5]
    arena.close()

    np.testing.assert_array_equal(view, rows(5, 1))


def test_another_process_adopts_what_this_one_committed_and_leaves_it():
    arena = filled(300)
    reader = child(
        __name__, f"arena = adopt({arena.name!r}); print(arena.committed, float(arena.keys[:, :, :300].sum()))"
    )
    out, error = reader.communicate(timeout=60)

    assert (out.split(), error) == (["300", str(float(rows(300, 1).sum()))], "")
    assert sweep() == []
    assert adopt(arena.name).committed == 300


def test_an_arena_may_outlive_its_writer_until_its_owner_ends():
    writer = child(__name__, f"print(Arena.create(LAYOUT, fingerprint=MODEL, epoch=7, owner={os.getpid()}).name)")
    name = writer.communicate(timeout=60)[0].strip()

    assert sweep() == []
    assert adopt(name).committed == 0


def test_a_killed_creator_leaks_nothing_after_a_sweep():
    creator = child(__name__, "arena = filled(3); print(arena.name, flush=True); input()")
    assert creator.stdout is not None
    name = creator.stdout.readline().strip()
    assert sweep() == []
    assert exists(name)

    creator.send_signal(signal.SIGKILL)
    creator.wait(timeout=60)

    assert sweep() == [name]
    assert not exists(name)
    assert sweep() == []


def test_a_creator_killed_between_entry_and_segment_leaves_nothing(registry: Path):
    creator = child(__name__, "from protocol.kv import segments as r; r.register('lp-' + '0' * 20, os.getpid())")
    assert creator.wait(timeout=60) == 0

    assert sweep() == ["lp-" + "0" * 20]
    assert list(registry.glob("*")) == []


def test_an_owner_that_ends_removes_all_its_segments(registry: Path):
    mine, others = create(), child(__name__, "arena = filled(3); print(arena.name, flush=True); input()")
    assert others.stdout is not None
    name = others.stdout.readline().strip()
    given = child(__name__, f"Arena.create(LAYOUT, fingerprint=MODEL, epoch=7, owner={os.getpid()})")
    assert given.wait(timeout=60) == 0

    unlink_owned()

    assert not exists(mine.name)
    assert [entry.name for entry in registry.glob("*")] == [name]
    others.communicate("")


def test_reserved_memory_is_not_reserved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("protocol.kv.segments.SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100 << 20))
    with (tmp_path / "lp-untouched").open("wb") as file:
        file.truncate(64 << 20)

    assert free_shared_memory() == 36 << 20


def test_a_process_id_used_again_is_another_process(registry: Path):
    arena = create()
    (entry,) = registry.glob("lp-*")
    entry.write_text(f'{{"pid": {os.getpid()}, "started": "long ago"}}')

    assert stale_segments() == [arena.name]


def test_a_sweep_with_nothing_to_do_makes_no_folder(registry: Path):
    assert sweep() == []
    assert not registry.exists()


def test_other_files_in_the_registry_are_kept(registry: Path):
    create()
    (registry / "notes.txt").write_text("mine")

    assert sweep() == []
    assert (registry / "notes.txt").exists()


def test_the_list_is_in_no_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """macOS removes files there that nobody used for three days: dirhelper.c in Apple's system_cmds."""
    monkeypatch.delenv(SEGMENTS_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", "/Users/somebody")
    folder = segments_folder()
    monkeypatch.setattr("protocol.paths.SHARED_MEMORY", tmp_path / "none")

    assert not any(folder.is_relative_to(temporary) for temporary in (tempfile.gettempdir(), "/tmp"))
    assert segments_folder() == Path.home() / "Library/Application Support/launch-pipeline/segments"


def test_a_list_that_can_not_be_written_or_made_is_a_segment_error(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    registry.symlink_to(tmp_path / "nowhere" / "else")
    with pytest.raises(SegmentError):
        create_segment(4096)

    (tmp_path / "file").touch()
    monkeypatch.setenv(SEGMENTS_VARIABLE, str(tmp_path / "file" / "segments"))

    with pytest.raises(SegmentError, match="make it writable"):
        create_segment(4096)
    assert stale_segments() == []


def test_an_entry_that_its_owner_removes_meanwhile_is_nobodys_business(registry: Path):
    name, memory = create_segment(4096)
    memory.close()
    # It is listed, and gone when it is read.
    entry = registry / f"{name[:-1]}{'0' if name[-1] != '0' else '1'}"
    entry.symlink_to(registry / "gone")

    unlink_owned()
    assert not exists(name)
    entry.unlink()
