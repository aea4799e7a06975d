"""Laws of the disk cache's folder: the bound holds, the list says what is kept, and clearing removes that alone."""

import errno
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from orchestrator.cli.app import cli
from orchestrator.cli.commands.cache import cached_models, clear_disk_cache
from protocol.errors import InputError, PipelineError
from protocol.kv.cache_files import CacheFiles, disk_cache_folder

MODEL, CONTENT = "0123456789abcdef" * 2, bytes(1000)


@pytest.fixture(autouse=True)
def root(home: Path) -> Path:
    return disk_cache_folder()


def keep(root: Path, *names: str, limit: int = 1 << 40) -> list[Path]:
    """Files of these names, written one after the other."""
    kept = CacheFiles(root, MODEL, "some/model", limit)
    files = [kept.folder / name for name in names]
    for age, file in enumerate(files):
        kept.write(file, [CONTENT])
        if file.exists():
            used = time.time() - 100 + age
            os.utime(file, (used, used))
    return files


def test_files_and_folders_are_the_users_alone(root: Path):
    files = keep(root, "1", "2")

    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert {folder.stat().st_mode & 0o777 for folder in (root, files[0].parent)} == {0o700}


def test_a_folder_that_others_can_enter_and_a_linked_one_are_refused(root: Path):
    root.mkdir(parents=True, mode=0o755)
    with pytest.raises(InputError, match="chmod 700"):
        keep(root)
    root.chmod(0o700)
    (root.parent / "elsewhere").mkdir(mode=0o700)
    (root / MODEL).symlink_to(root.parent / "elsewhere")
    with pytest.raises(InputError, match="is a link"):
        keep(root)


def test_the_least_recently_used_files_go_first_and_the_bound_holds(root: Path):
    files = keep(root, *"12345", limit=4 * len(CONTENT) + 500)

    assert [file.exists() for file in files] == [False, True, True, True, True]
    assert sum(model.bytes for model in cached_models()) <= 4 * len(CONTENT)


def test_files_of_a_clock_that_ran_ahead_go_before_new_ones_and_others_files_are_not_counted(root: Path):
    picture = root / "pictures" / "one"
    picture.parent.mkdir(mode=0o700, parents=True)
    root.chmod(0o700)
    picture.write_bytes(CONTENT)
    for file in keep(root, *"1234"):
        os.utime(file, (2e9, 2e9))

    assert all(file.exists() for file in keep(root, *"567", limit=7 * len(CONTENT) // 2))
    assert picture.exists()


def test_the_command_lists_and_clears(root: Path):
    def cache(*words: str) -> str:
        return CliRunner().invoke(cli, ["cache", *words], input="n\n").output

    assert "Nothing is kept" in cache("list")
    files = keep(root, *"123")

    assert {"model", "3"} <= set(cache("list").split())
    assert '"chunks": 3' in cache("list", "--json")
    assert "Aborted" in cache("clear")
    assert all(file.exists() for file in files)
    assert "removed" in cache("clear", "--yes")
    assert cached_models() == []


def test_clearing_reaches_what_is_behind_a_link_in_place_of_the_folder_and_nothing_else(root: Path):
    elsewhere = root.parent.parent / "large"
    (elsewhere / "pictures").mkdir(parents=True)
    (elsewhere / "pictures" / "one").write_bytes(b"1")
    elsewhere.chmod(0o700)
    root.parent.mkdir(exist_ok=True)
    root.symlink_to(elsewhere)
    keep(root, *"123")

    assert clear_disk_cache() == 3 * len(CONTENT)
    assert [file.name for file in elsewhere.rglob("*")] == ["pictures", "one"]


def test_clearing_follows_no_link_in_the_folder_and_says_what_is_left(root: Path):
    keep(root, *"123")
    elsewhere = root.parent / "moved"
    (root / MODEL).rename(elsewhere)
    (root / MODEL).symlink_to(elsewhere)
    inner = root / ("0" * 32)
    inner.mkdir()
    (inner / "link").symlink_to(elsewhere)

    cleared = CliRunner().invoke(cli, ["cache", "clear", "--yes"])

    assert isinstance(cleared.exception, PipelineError)
    assert f"{root / MODEL} (a link to {elsewhere}" in str(cleared.exception)
    assert len(list(elsewhere.glob("[123]"))) == 3
    assert not inner.exists()


def test_clearing_says_what_could_not_be_removed(root: Path, monkeypatch: pytest.MonkeyPatch):
    keep(root, "1.rows")
    remove = os.unlink

    def refused(path: str, **where: int) -> None:
        if path.endswith(".rows"):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        remove(path, **where)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refused)
        with pytest.raises(PipelineError, match=r"^0\.00 GB.*Operation not permitted"):
            clear_disk_cache()
