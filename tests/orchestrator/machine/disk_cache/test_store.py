"""Laws of the disk cache: what it gives back is what was kept, of these tokens and this model, or nothing."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli.app import cli
from orchestrator.machine.disk_cache.chunks import CHUNK, chunk_names, model_name
from orchestrator.machine.disk_cache.store import ChunkStore, cached_models, clear_disk_cache, disk_cache_folder
from protocol.common_prefix import common_prefix
from protocol.errors import InputError, PipelineError
from protocol.kv.arena import Arena
from protocol.kv.arena_header import ArenaError, ArenaLayout, ElementType, model_key
from protocol.kv.segments import sweep
from tests.support.processes import until

LAYOUT = ArenaLayout(2, 3, 4 * CHUNK, 8, ElementType.FLOAT16)
MODEL = model_name(model_key("m"), LAYOUT, "1.0")
TOKENS = tuple(range(3 * CHUNK + 17))
FILE_BYTES = replace(LAYOUT, capacity=CHUNK).segment_bytes
WRITER = """
import sys
from pathlib import Path
from tests.orchestrator.machine.disk_cache.test_store import TOKENS, store, written
arena = written()
kept = store(Path(sys.argv[1]))
print("ready", flush=True)
for _ in range(1000):
    for place, file in enumerate(kept._files(TOKENS)):
        kept.write(file, arena, place)
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    return disk_cache_folder()


def written(tokens: int = len(TOKENS), fingerprint: str = "m") -> Arena:
    """An arena with rows of its own for every token."""
    arena = Arena.create(LAYOUT, fingerprint=fingerprint, epoch=5)
    rows = np.random.default_rng(1).random((2, LAYOUT.layers, LAYOUT.kv_heads, tokens, LAYOUT.head_size))
    keys, values = rows.astype(np.float16)
    arena.write_rows(0, list(keys), list(values))
    arena.commit(tokens)
    return arena


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = written()
    yield made
    made.close()
    made.unlink()


@pytest.fixture
def empty() -> Iterator[Arena]:
    made = Arena.create(LAYOUT, fingerprint="m", epoch=6)
    yield made
    made.close()
    made.unlink()


def store(root: Path, limit: int = 1 << 40, name: str = MODEL) -> ChunkStore:
    return ChunkStore(root, name, "some/model", limit)


def keep(kept: ChunkStore, arena: Arena, tokens: tuple[int, ...] = TOKENS) -> int:
    missing = kept.missing(tokens)
    for place, file in missing:
        kept.write(file, arena, place)
    return len(missing)


@given(
    one=st.lists(st.integers(0, 9), max_size=4),
    other=st.lists(st.integers(0, 9), max_size=4),
)
def test_two_prompts_share_the_names_of_their_common_chunks_alone(one: list[int], other: list[int]):
    first, second = (list(chunk_names(MODEL, np.repeat(tokens, CHUNK).tolist())) for tokens in (one, other))

    assert len(first) == len(one)
    assert set(first) & set(second) == set(first[: common_prefix(one, other)])


def test_another_model_form_or_version_has_other_names():
    others = [replace(LAYOUT, dtype=ElementType.BFLOAT16), replace(LAYOUT, layers=1), replace(LAYOUT, head_size=4)]
    names = [MODEL, model_name(model_key("n"), LAYOUT, "1.0"), model_name(model_key("m"), LAYOUT, "1.1")]
    names += [model_name(model_key("m"), layout, "1.0") for layout in others]

    assert len(set(names)) == len(names)
    assert model_name(model_key("m"), replace(LAYOUT, capacity=7), "1.0") == MODEL


def test_what_was_kept_is_read_by_a_later_process(root: Path, arena: Arena, empty: Arena):
    assert keep(store(root), arena) == 3
    later = store(root)

    files = later.kept((*TOKENS, 7, 7))
    for place, file in enumerate(files):
        later.read(file, empty, place)

    assert len(files) == 3
    rows = slice(0, 3 * CHUNK)
    assert np.array_equal(empty.keys[:, :, rows], arena.keys[:, :, rows])
    assert np.array_equal(empty.values[:, :, rows], arena.values[:, :, rows])
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert root.stat().st_mode & 0o777 == 0o700


def test_a_later_turn_writes_only_its_new_chunks(root: Path, arena: Arena):
    kept = store(root)

    assert keep(kept, arena, TOKENS[: 2 * CHUNK]) == 2
    assert keep(kept, arena) == 1
    assert keep(kept, arena) == 0


def test_a_prompt_that_differs_early_finds_nothing(root: Path, arena: Arena):
    keep(store(root), arena)

    assert store(root).kept((9, *TOKENS[1:])) == []
    assert len(store(root).kept((*TOKENS[: CHUNK + 3], 9, *TOKENS[CHUNK + 4 :]))) == 1
    assert store(root, name=model_name(model_key("n"), LAYOUT, "1.0")).kept(TOKENS) == []


def damaged(content: bytes, how: str) -> bytes:
    return {
        "torn": content[: len(content) // 2],
        "one bit": content[:-5] + bytes([content[-5] ^ 1]) + content[-4:],
        "header": b"\0" + content[1:],
        "empty": b"",
    }[how]


@pytest.mark.parametrize("how", ["torn", "one bit", "header", "empty"])
def test_a_damaged_file_is_refused_and_removed(root: Path, arena: Arena, empty: Arena, how: str):
    kept = store(root)
    keep(kept, arena)
    file = kept.kept(TOKENS)[1]
    file.write_bytes(damaged(file.read_bytes(), how))

    with pytest.raises(ArenaError, match="is not used"):
        kept.read(file, empty, 1)
    assert not file.exists()
    assert len(kept.kept(TOKENS)) == 1


def test_another_models_file_under_this_name_is_refused(root: Path, empty: Arena):
    kept, foreign = store(root), written(fingerprint="n")
    keep(kept, foreign)
    foreign.close()
    foreign.unlink()

    with pytest.raises(ArenaError, match="another model"):
        kept.read(kept.kept(TOKENS)[0], empty, 0)


def test_a_copied_file_of_other_tokens_is_refused(root: Path, arena: Arena, empty: Arena):
    kept = store(root)
    keep(kept, arena)
    first, second, _ = kept.kept(TOKENS)
    second.write_bytes(first.read_bytes())

    with pytest.raises(ArenaError, match="other tokens"):
        kept.read(second, empty, 1)


def test_a_file_that_others_can_read_is_refused(root: Path, arena: Arena, empty: Arena):
    kept = store(root)
    keep(kept, arena)
    file = kept.kept(TOKENS)[0]
    file.chmod(0o644)

    with pytest.raises(ArenaError, match="Other users can read"):
        kept.read(file, empty, 0)


def test_a_folder_that_others_can_enter_is_refused(root: Path):
    root.mkdir(parents=True, mode=0o755)

    with pytest.raises(InputError, match="chmod 700"):
        store(root)


def test_the_least_recently_used_files_go_first_and_the_bound_holds(root: Path, arena: Arena):
    kept = store(root, limit=4 * FILE_BYTES + 1000)
    keep(kept, arena)
    for age, file in enumerate(kept.kept(TOKENS)):
        used = time.time() - 100 + age
        os.utime(file, (used, used))
    other = tuple(range(50, 50 + 2 * CHUNK))

    keep(kept, arena, other)

    assert len(kept.kept(other)) == 2
    assert kept.kept(TOKENS) == []
    assert sum(model.bytes for model in cached_models()) <= 4 * FILE_BYTES


def test_a_file_that_vanishes_is_no_error(root: Path, arena: Arena, empty: Arena):
    kept = store(root)
    keep(kept, arena)
    files = kept.kept(TOKENS)
    clear_disk_cache()

    with pytest.raises(ArenaError, match="removed"):
        kept.read(files[0], empty, 0)
    assert store(root).kept(TOKENS) == []


def test_a_process_that_is_killed_while_it_writes_leaves_no_damaged_file(root: Path, empty: Arena):
    with subprocess.Popen([sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        until(lambda: list(root.rglob("*.kv")))
        process.kill()
    sweep()

    kept = store(root)
    for place, file in enumerate(kept.kept(TOKENS)):
        kept.read(file, empty, place)


def test_the_command_lists_and_clears(root: Path, arena: Arena):
    assert "Nothing is kept" in CliRunner().invoke(cli, ["cache", "list"]).output
    keep(store(root), arena)

    listed = CliRunner().invoke(cli, ["cache", "list"]).output
    assert "model" in listed
    assert str(3) in listed
    assert '"chunks": 3' in CliRunner().invoke(cli, ["cache", "list", "--json"]).output
    assert CliRunner().invoke(cli, ["cache", "clear"], input="n\n").exit_code == 1
    assert len(store(root).kept(TOKENS)) == 3
    assert "removed" in CliRunner().invoke(cli, ["cache", "clear", "--yes"]).output
    assert cached_models() == []


def test_clearing_reaches_what_is_behind_a_link_in_place_of_the_folder_and_nothing_else(root: Path, arena: Arena):
    elsewhere = root.parent.parent / "large"
    (elsewhere / "pictures").mkdir(parents=True)
    (elsewhere / "pictures" / "one").write_bytes(b"1")
    elsewhere.chmod(0o700)
    root.parent.mkdir(exist_ok=True)
    root.symlink_to(elsewhere)
    keep(store(root), arena)

    assert clear_disk_cache() == 3 * FILE_BYTES
    assert [file.name for file in elsewhere.rglob("*")] == ["pictures", "one"]


def test_the_bound_counts_and_removes_the_caches_own_files_alone(root: Path, arena: Arena):
    root.mkdir(mode=0o700, parents=True)
    (root / "pictures").mkdir()
    (root / "pictures" / "one").write_bytes(bytes(FILE_BYTES))

    keep(store(root, limit=7 * FILE_BYTES // 2), arena)

    assert (root / "pictures" / "one").exists()
    assert len(store(root).kept(TOKENS)) == 3


def test_clearing_follows_no_link_in_the_folder_and_says_what_is_left(root: Path, arena: Arena):
    keep(store(root), arena)
    elsewhere = root.parent / "moved"
    (root / MODEL).rename(elsewhere)
    (root / MODEL).symlink_to(elsewhere)
    inner = root / ("0" * 32)
    inner.mkdir()
    (inner / "link").symlink_to(elsewhere)

    cleared = CliRunner().invoke(cli, ["cache", "clear", "--yes"])

    assert isinstance(cleared.exception, PipelineError)
    assert f"{root / MODEL} (a link to {elsewhere}" in str(cleared.exception)
    assert len(list(elsewhere.glob("*.kv"))) == 3
    assert not inner.exists()


def test_a_linked_folder_of_a_model_is_not_used(root: Path):
    elsewhere = root.parent.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    root.mkdir(mode=0o700, parents=True)
    (root / MODEL).symlink_to(elsewhere)

    with pytest.raises(InputError, match="is a link"):
        store(root)


def test_clearing_says_what_could_not_be_removed(root: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch):
    keep(store(root), arena)
    remove = os.unlink

    def refused(path: str, **where: int) -> None:
        if path.endswith(".kv"):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        remove(path, **where)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refused)
        with pytest.raises(PipelineError, match=r"^0\.00 GB.*Operation not permitted"):
            clear_disk_cache()
