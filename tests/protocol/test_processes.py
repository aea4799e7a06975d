"""What a process asks of the system: one start time until it ends, open files, and its own modules."""

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protocol import processes
from protocol.child_process import module_command
from protocol.processes import BsdInfo, raise_descriptor_limit, start_time
from tests.support.processes import until


def child() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)


def test_a_process_has_one_start_time_until_it_ends():
    process = child()
    first, second = start_time(process.pid), start_time(process.pid)
    process.kill()
    process.communicate(timeout=60)

    assert first == second is not None
    assert start_time(process.pid) is None


def test_a_zombie_process_has_ended():
    process = child()
    process.kill()

    # Nobody has waited for it.
    until(lambda: start_time(process.pid) is None)
    process.communicate()


def test_the_structure_is_libprocs():
    """Offsets of struct proc_bsdinfo: XNU, bsd/sys/proc_info.h, with MAXCOMLEN 16 (bsd/sys/param.h)."""
    assert ctypes.sizeof(BsdInfo) == 136
    assert (BsdInfo.pid.offset, BsdInfo.command.offset, BsdInfo.name.offset) == (12, 48, 64)
    assert (BsdInfo.nice.offset, BsdInfo.start_seconds.offset, BsdInfo.start_microseconds.offset) == (116, 120, 128)


@pytest.mark.parametrize("found", [True, False])
def test_libproc_tells_the_seconds_of_the_start_of_a_process_that_it_finds(found: bool):
    def proc_pidinfo(pid: int, flavor: int, argument: int, buffer: Any, size: int) -> int:
        assert (flavor, argument, size) == (3, 0, 136)
        ctypes.cast(buffer, ctypes.POINTER(BsdInfo)).contents.start_seconds = 1_700_000_000
        return size if found else 0

    library: Any = SimpleNamespace(proc_pidinfo=proc_pidinfo)

    assert processes._from_libproc(os.getpid(), library) == ("1700000000" if found else None)


WANTED = 10_240
NOFILE, UNLIMITED = resource.RLIMIT_NOFILE, resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (256, UNLIMITED, (WANTED, UNLIMITED)),
        (256, 4096, (4096, 4096)),
        (256, 1 << 20, (WANTED, 1 << 20)),
        (WANTED, UNLIMITED, None),
        (1 << 16, 1 << 20, None),
        (UNLIMITED, UNLIMITED, None),
    ],
)
def test_the_soft_limit_is_raised_to_the_most_that_macos_takes_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: tuple[int, int] | None
):
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))

    raise_descriptor_limit()

    assert given == ([] if raised is None else [raised])


def test_a_system_that_refuses_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch):
    asked: list[object] = []

    def refused(_: int, limits: object) -> None:
        asked.append(limits)
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, UNLIMITED))
    monkeypatch.setattr(resource, "setrlimit", refused)

    raise_descriptor_limit()

    assert len(asked) == 1


def test_children_inherit_the_limit():
    program = """
import resource, subprocess, sys
from protocol.processes import raise_descriptor_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
raise_descriptor_limit()
asked = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
subprocess.run([sys.executable, "-c", asked])
"""
    hard = resource.getrlimit(NOFILE)[1]
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert int(told.stdout) == (WANTED if hard == UNLIMITED else min(WANTED, hard))


def test_a_package_of_the_same_name_in_the_current_folder_is_not_taken(tmp_path: Path):
    """Such as another version's checkout."""
    (tmp_path / "protocol").mkdir()
    (tmp_path / "protocol" / "__init__.py").write_text("raise SystemExit(3)")

    command = module_command("protocol.child_process")
    assert subprocess.run(command, cwd=tmp_path).returncode == 0
    assert subprocess.run([part for part in command if part != "-P"], cwd=tmp_path).returncode == 3
