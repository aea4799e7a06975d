"""Laws of the list of running servers: private, without those that have ended, the latest first."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from orchestrator.machine.servers import RunningServer, announced, http_address, running_servers
from protocol.errors import InputError
from protocol.processes import start_time


def _write(folder: Path, name: str, process: int, started: str) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / name
    file.write_bytes(msgspec.json.encode(RunningServer("http://127.0.0.1:1", "k", process, started)))
    file.chmod(0o600)
    return file


def test_a_server_is_listed_while_it_runs_and_only_its_user_can_read_how(tmp_path: Path):
    folder = tmp_path / "servers"

    with announced(folder, "http://127.0.0.1:8080", "a-key") as note:
        (server,) = running_servers(folder)
        (file,) = folder.iterdir()
        assert (note, server.address, server.key, server.process) == ("", "http://127.0.0.1:8080", "a-key", os.getpid())
        assert (stat.S_IMODE(folder.stat().st_mode), stat.S_IMODE(file.stat().st_mode)) == (0o700, 0o600)

    assert running_servers(folder) == list(folder.iterdir()) == []


@pytest.mark.parametrize("look", ["list", "announce"])
def test_a_killed_server_and_one_whose_number_another_process_got_are_forgotten(tmp_path: Path, look: str):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = [_write(tmp_path / "servers", f"{process}.json", process, "1") for process in (ended.pid, os.getppid())]

    if look == "list":
        assert running_servers(tmp_path / "servers") == []
    else:
        with announced(tmp_path / "servers", "http://127.0.0.1:8080", "a-key"):
            assert len(running_servers(tmp_path / "servers")) == 1
    assert not any(file.exists() for file in left)


def test_the_latest_server_comes_first(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as later:
        for process in (os.getpid(), later.pid):
            _write(tmp_path / "servers", f"{process}.json", process, start_time(process) or "")

        found = [server.process for server in running_servers(tmp_path / "servers")]
        assert later.stdin is not None
        later.stdin.write(b"\n")

    assert found == [later.pid, os.getpid()]


def test_a_file_that_others_could_have_written_is_refused(tmp_path: Path):
    _write(tmp_path / "servers", "any.json", os.getpid(), start_time(os.getpid()) or "").chmod(0o644)

    with pytest.raises(InputError, match="Other users can read"):
        running_servers(tmp_path / "servers")


def test_a_server_runs_although_it_cannot_be_listed(tmp_path: Path):
    (tmp_path / "servers").write_text("no folder")

    with announced(tmp_path / "servers", "http://127.0.0.1:8080", None) as note:
        assert note.startswith("`launch` will not find this server: ")

    assert running_servers(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("192.168.1.5", "http://192.168.1.5:80"),
    ],
)
def test_a_server_at_all_addresses_is_reached_at_loopback(host: str, address: str):
    assert http_address(host, 80) == address
