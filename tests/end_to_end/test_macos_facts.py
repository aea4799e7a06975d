"""What macOS would punish and Linux lets pass: lengths of names, fork, resource trackers. Held where Linux allows.

Ending by request before force is held by tests/orchestrator/runtime/workers/test_supervisor.py.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.runtime import session
from orchestrator.runtime.session import Session
from protocol.kv.segments import create_segment, sweep
from protocol.security.addresses import require_local
from tests.support.paths import ROOT

PACKAGES = ("protocol", "draft_worker", "target_worker", "orchestrator")
LONGEST_SHARED_NAME = 31
"""With the slash (PSHMNAMLEN)."""
LONGEST_SOCKET_PATH = 100
"""Bytes; sun_path has 104."""
HIGHEST_USER = 2**32 - 2
HIGHEST_PROCESS = 99_999 * 100
FORKS = {"fork", "forkpty", "posix_spawn", "register_at_fork"}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield str(file.relative_to(ROOT)), ast.parse(file.read_text())


def test_names_of_segments_fit(registry: Path):
    name, memory = create_segment(4096)
    memory.close()

    assert len(f"/{name}") <= LONGEST_SHARED_NAME


def test_socket_paths_fit_for_the_longest_user_and_process_ids(monkeypatch: pytest.MonkeyPatch):
    made: list[str] = []

    def made_there(prefix: str, dir: Path) -> str:
        made.append(f"{dir}/{prefix}12345678")
        return made[-1]

    monkeypatch.setattr(os, "getuid", lambda: HIGHEST_USER)
    monkeypatch.setattr(os, "getpid", lambda: HIGHEST_PROCESS)
    monkeypatch.setattr(session.tempfile, "mkdtemp", made_there)
    monkeypatch.setattr(session, "private_folder", lambda home: home)
    # The registry is the present user's.
    monkeypatch.setattr(session.segments, "sweep", lambda: [])
    opened = Session.create()

    assert str(HIGHEST_USER) in made[0]
    assert str(HIGHEST_PROCESS) in made[0]
    for address in (opened.client_address, opened.worker_address):
        require_local(address)
        assert len(os.fsencode(address.removeprefix("ipc://"))) <= LONGEST_SOCKET_PATH


def forks(node: ast.AST) -> Iterator[str]:
    """What this piece of a program would fork with."""
    match node:
        case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in FORKS:
            yield f"os.{name}"
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args, keywords=keywords):
            given = {keyword.arg for keyword in keywords}
            if name in {"get_context", "set_start_method"} and [ast.unparse(arg) for arg in args] != ["'spawn'"]:
                yield f"{name} of another method than spawn"
            if name == "ProcessPoolExecutor" and "mp_context" not in given:
                yield "a ProcessPoolExecutor of the default method"
            if "preexec_fn" in given:
                yield "preexec_fn"
        case ast.ImportFrom(module="multiprocessing", names=names):
            yield from (name.name for name in names if name.name not in {"resource_tracker", "get_context"})
        case ast.Import(names=names):
            yield from (name.name for name in names if name.name.startswith("multiprocessing"))
        case _:
            pass


@pytest.mark.thorough
def test_no_process_is_forked():
    """After Metal or Objective-C ran, a forked child may hang: every process is spawned."""
    assert [f"{file}: {what}" for file, tree in sources() for node in ast.walk(tree) for what in forks(node)] == []


@pytest.mark.parametrize(
    "program",
    [
        *("os.fork()", "import multiprocessing", "from multiprocessing import Process", "get_context()"),
        *("get_context('fork')", "ProcessPoolExecutor(4)", "subprocess.Popen([], preexec_fn=f)"),
    ],
)
def test_what_forks_is_found(program: str):
    assert [what for node in ast.walk(ast.parse(program)) for what in forks(node)]


def test_no_resource_tracker_knows_of_our_segments(registry: Path):
    """Before Python 3.13 the tracker of a process that attaches unlinks a live segment; ours are never registered."""
    name, memory = create_segment(4096)
    program = f"""
from multiprocessing import resource_tracker
from protocol.kv.segments import create_segment, open_segment
open_segment({name!r}).close()
create_segment(4096)
assert resource_tracker._resource_tracker._fd is None
resource_tracker.ensure_running()
"""
    attached = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert (attached.returncode, attached.stderr) == (0, "")
    memory.close()
    assert len(sweep()) == 1
    assert any(entry.name == name for entry in registry.glob("*"))


@pytest.mark.thorough
def test_the_standard_librarys_shared_memory_is_not_used():
    for file, tree in sources():
        names = {name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names}
        assert not names & {"shared_memory", "SharedMemory"}, file
