"""Servers as processes that always end and free their ports; requests to them, and a word for each answer."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
        listed = subprocess.run(["ps", "-A", "-o", f"pid=,ppid=,{column}="], capture_output=True, text=True, check=True)
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


PROMPT = "def quicksort(items):"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CHAT_BODY = {"messages": [{"role": "user", "content": "import"}]}


class NoAnswer(Exception):
    """The server did not answer in time."""


Body = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any
    headers: httpx.Headers

    @property
    def message(self) -> Body:
        """The only message of a chat."""
        return self.body["choices"][0]["message"]

    @property
    def texts(self) -> list[str]:
        """The texts of a completion; none if the request was refused."""
        choices = self.body.get("choices", []) if isinstance(self.body, dict) else []
        return [choice.get("text") or (choice.get("message") or {}).get("content") or "" for choice in choices]

    @property
    def error(self) -> str:
        """The status, and a note if the body is not an error object of OpenAI's API."""
        known = isinstance(self.body, dict) and isinstance(self.body.get("error"), dict)
        return f"{self.status}{'' if known and self.body['error'].get('message') else ', another form'}"


def ask(server: RunningServer, path: str, body: Any = None, *, key: bool = True, **headers: str) -> Answer | None:
    """None if the server closed the connection. A body of bytes is sent unchanged. Raises NoAnswer."""
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    sent = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
    with server.client(key) as client:
        try:
            response = client.request("GET" if body is None else "POST", path, content=content, headers=sent)
        except httpx.TimeoutException as error:
            raise NoAnswer from error
        except httpx.TransportError:
            return None
    try:
        return Answer(response.status_code, response.json(), response.headers)
    except ValueError:
        return Answer(response.status_code, response.text, response.headers)


def complete(server: RunningServer, **fields: Any) -> Answer | None:
    """A short greedy completion; `fields` override the parameters."""
    return ask(server, COMPLETIONS, {"prompt": PROMPT, "temperature": 0, "max_tokens": 16, **fields})


def chat(server: RunningServer, **fields: Any) -> Answer | None:
    return ask(server, CHAT, {**CHAT_BODY, "temperature": 0, "max_tokens": 16, **fields})


def streamed_chat(server: RunningServer, **fields: Any) -> Body:
    """The message that the deltas of a stream make; each whole call is in one delta."""
    message: Body = {"content": "", "reasoning_content": "", "reasoning": "", "tool_calls": []}
    body = {**CHAT_BODY, "temperature": 0, "max_tokens": 16, "stream": True, **fields}
    with server.client() as client:
        lines = client.post(CHAT, json=body).text.splitlines()
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                for name in message:
                    message[name] += choice["delta"].get(name) or message[name][:0]
    return message


def effect(answer: Answer | None, honoured: Callable[[Answer], bool], otherwise: str = "ignored") -> str:
    """Whether the server honoured a parameter."""
    if answer is None:
        return "closes the connection"
    if answer.status >= 400:
        return f"refused ({answer.error})"
    return "done" if honoured(answer) else otherwise


def at_route(answer: Answer | None, honoured: Callable[[Answer], bool]) -> str:
    """The effect of a request at a route that not every server has."""
    return f"no ({answer.status})" if answer is not None and answer.status == 404 else effect(answer, honoured)


def refused(answer: Answer | None) -> str:
    """Whether the server refused an invalid request."""
    if answer is None:
        return "closes the connection"
    return f"refused ({answer.error})" if answer.status >= 400 else "answered"
