"""The list of shared memory stays where nobody cleans, and takes over what earlier releases listed elsewhere."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from protocol.kv import segment_registry
from protocol.kv.segments import SegmentError, create_segment, open_segment, stale_segments, sweep, unlink_segment
from protocol.paths import SEGMENTS_VARIABLE, segments_folder
from protocol.process_identity import start_time


@pytest.fixture
def old(registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of earlier releases. The registry is this test's own, but not by the environment."""
    monkeypatch.delenv(SEGMENTS_VARIABLE)
    monkeypatch.setattr(segment_registry, "segments_folder", lambda: registry)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"launch-pipeline-{os.getuid()}-segments"
    folder.mkdir(mode=0o700)
    return folder


def listed_before(old: Path, registry: Path, owner: int, started: str) -> str:
    """A segment that an earlier release listed."""
    name, memory = create_segment(4096)
    memory.close()
    (registry / name).unlink()
    (old / name).write_text(json.dumps({"pid": owner, "started": started}))
    return name


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=60)
    return process.pid


def exists(name: str) -> bool:
    try:
        open_segment(name).close()
    except SegmentError:
        return False
    return True


def test_the_list_is_in_no_temporary_folder(monkeypatch: pytest.MonkeyPatch):
    """macOS removes files there that nobody used for three days: dirhelper.c in Apple's system_cmds."""
    monkeypatch.delenv(SEGMENTS_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", "/Users/somebody")
    folder = segments_folder()

    assert not folder.is_relative_to(tempfile.gettempdir())
    assert not folder.is_relative_to("/tmp")


def test_the_list_of_a_mac_is_among_its_applications_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv(SEGMENTS_VARIABLE, raising=False)
    monkeypatch.setattr("protocol.paths.SHARED_MEMORY", tmp_path / "none")

    assert segments_folder() == Path.home() / "Library/Application Support/launch-pipeline/segments"


def test_a_living_owners_segment_is_taken_over(old: Path, registry: Path):
    name = listed_before(old, registry, os.getpid(), "Sun Nov 22 13:20:01 2026")

    assert sweep() == []
    assert exists(name)
    assert json.loads((registry / name).read_text()) == {"pid": os.getpid(), "started": start_time(os.getpid())}
    assert not old.exists()


def test_a_dead_owners_segment_is_unlinked(old: Path, registry: Path):
    name = listed_before(old, registry, ended_process(), "123")

    assert sweep() == [name]
    assert not exists(name)
    assert not old.exists()


def test_a_folder_that_others_can_write_is_not_believed(old: Path, registry: Path):
    name = listed_before(old, registry, ended_process(), "123")
    old.chmod(0o777)

    assert sweep() == []
    assert exists(name)
    unlink_segment(name)


def test_a_list_that_can_not_be_written_is_a_segment_error(registry: Path, tmp_path: Path):
    registry.symlink_to(tmp_path / "nowhere" / "else")

    with pytest.raises(SegmentError):
        create_segment(4096)


def test_a_place_for_the_list_that_can_not_be_made_is_a_segment_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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

    assert segment_registry.owned() == [name]
    entry.unlink()
    unlink_segment(name)
