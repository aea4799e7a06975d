"""What macOS would punish and Linux lets pass: lengths of names, resource trackers. Forks are refused by ruff, by the
banned modules of pyproject.toml."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.runtime import session
from orchestrator.runtime.session import Session
from protocol.kv.segments import create_segment, sweep
from protocol.paths import SESSIONS_VARIABLE
from protocol.security.addresses import require_local

LONGEST_SOCKET_PATH = 100
"""Bytes; sun_path has 104."""
HIGHEST_USER = 2**32 - 2
HIGHEST_PROCESS = 99_999 * 100


KEPT = "/var/folders/zz/zyxvpxvq6csfxvn_n0000000000000/0/"
"""As `getconf DARWIN_USER_DIR` has it."""


@pytest.mark.parametrize(
    ("system", "home", "place"),
    [
        ("linux", "/home/somebody", f"/tmp/launch-pipeline-{HIGHEST_USER}"),
        ("darwin", "/Users/somebody", "/Users/somebody/Library/Application Support/launch-pipeline/sessions"),
        ("darwin", "/Users/" + "long" * 5, f"{KEPT}launch-pipeline"),
    ],
)
def test_sockets_have_short_paths_where_macos_removes_nothing(
    system: str, home: str, place: str, monkeypatch: pytest.MonkeyPatch
):
    made: list[str] = []

    def made_there(prefix: str, dir: Path) -> str:
        made.append(f"{dir}/{prefix}12345678")
        return made[-1]

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(os, "confstr", {65536: KEPT}.get)
    monkeypatch.setattr(os, "getuid", lambda: HIGHEST_USER)
    monkeypatch.setattr(os, "getpid", lambda: HIGHEST_PROCESS)
    monkeypatch.setattr(session.tempfile, "mkdtemp", made_there)
    monkeypatch.setattr(session, "private_folder", lambda home: home)
    monkeypatch.delenv(SESSIONS_VARIABLE)
    # The registry is the present user's.
    monkeypatch.setattr(session.segments, "sweep", lambda: [])
    opened = Session.create()

    assert made == [f"{place}/lp-{HIGHEST_PROCESS}-12345678"]
    for address in (opened.client_address, opened.worker_address):
        require_local(address)
        assert len(os.fsencode(address.removeprefix("ipc://"))) <= LONGEST_SOCKET_PATH


def test_no_resource_tracker_knows_of_our_segments(registry: Path):
    """Before Python 3.13 the tracker of a process that attaches unlinks a live segment; ours are never registered."""
    name, memory = create_segment(4096)
    program = f"""
from multiprocessing import resource_tracker
from protocol.kv.segments import create_segment, open_segment
open_segment({name!r}).close()
create_segment(4096)
resource_tracker.ensure_running()
"""
    attached = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert (attached.returncode, attached.stderr) == (0, "")
    memory.close()
    assert len(sweep()) == 1
    assert any(entry.name == name for entry in registry.glob("*"))
