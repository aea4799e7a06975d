"""Servers as processes: each starts on a free port, always ends, and frees its port. Knows no requests."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[4]
_START_SECONDS, _END_SECONDS = 120.0, 15.0


@dataclass(frozen=True)
class Server:
    title: str
    arguments: Sequence[str]
    """Arguments of Python; the port is appended."""
    key: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beyond our own."""
    models: Sequence[str] = ()
    """Names by which requests select its models, if it has several."""


@dataclass
class RunningServer:
    server: Server
    port: int
    process: subprocess.Popen[bytes]
    occupied: bool = False
    """It still works for a client that disconnected; the next probe needs a new server."""

    def client(self, key: bool = True) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.server.key}"} if key and self.server.key else {}
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=300)

    def healthy(self) -> bool:
        try:
            with self.client() as client:
                return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def processor_seconds(self) -> float:
        """Spent so far by the server and all of its children, in steps of a second."""
        return sum(_seconds(spent) for _, spent in self._family("time"))

    def memory(self) -> int:
        """Resident bytes of the server and all of its children. What they share is counted once on Linux."""
        return sum(_shared_once(pid) or int(kibibytes) << 10 for pid, kibibytes in self._family("rss"))

    def _family(self, column: str) -> list[tuple[int, str]]:
        """Process ids of the server and all of its children, and a column of `ps`."""
        listed = subprocess.run(["ps", "-A", "-o", f"pid=,ppid=,{column}="], capture_output=True, text=True, check=True)  # noqa: S607
        rows = [line.split() for line in listed.stdout.splitlines()]
        family = {self.process.pid}
        while more := {int(pid) for pid, parent, _ in rows if int(parent) in family} - family:
            family |= more
        return [(int(pid), value) for pid, _, value in rows if int(pid) in family]


@contextmanager
def running(server: Server) -> Iterator[RunningServer]:
    """A server that answers. Raises RuntimeError if it does not start, or leaves its port taken."""
    port = _free_port()
    # In a process group of its own: Ctrl-C must reach this program only, which then ends the server.
    process = subprocess.Popen(
        [sys.executable, *server.arguments, "--port", str(port)],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **server.environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        started = RunningServer(server, port, process)
        _await_health(started)
        yield started
    finally:
        # A second Ctrl-C must not leave the server behind.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        _end(process)
        signal.signal(signal.SIGINT, before)
        if not _is_free(port):
            raise RuntimeError(f"{server.title} ended, and port {port} is still taken: see `lsof -i :{port}`.")


def end_with_servers() -> None:
    """SIGINT and SIGTERM raise KeyboardInterrupt, also in a shell's background job: both must end the servers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def _await_health(running_server: RunningServer) -> None:
    until = time.monotonic() + _START_SECONDS
    while not running_server.healthy():
        if time.monotonic() > until or running_server.process.poll() is not None:
            server = running_server.server
            raise RuntimeError(f"{server.title} did not start: try `python {' '.join(server.arguments)}`.")
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGINT, then SIGTERM, then SIGKILL for the whole group."""
    for number in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
        try:
            process.wait(_END_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def _is_free(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return True
    return False


def _shared_once(pid: int) -> int | None:
    """Bytes of a process with its share of what it shares (Linux's PSS); None where the system does not tell."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return None


def _seconds(spent: str) -> float:
    """From the format of `ps`: [days-]hours:minutes:seconds on Linux, minutes:seconds.hundredths on macOS."""
    days, _, clock = spent.rpartition("-")
    total = 0.0
    for part in clock.split(":"):
        total = total * 60 + float(part)
    return total + 86_400 * int(days or 0)
