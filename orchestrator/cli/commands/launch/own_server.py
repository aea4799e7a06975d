"""A server for one program: `serve` in a process of its own, on a free port of loopback, with a key of its own."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from orchestrator.cli.commands.launch.serve_options import ServeSettings
from orchestrator.cli.commands.launch.server import HttpServer
from orchestrator.cli.pipelines import print_notes
from orchestrator.machine.running_servers import running_servers
from orchestrator.runtime.session import temporary_folder
from protocol.own_modules import module_command
from protocol.paths import SERVERS_VARIABLE

_POLL_SECONDS = 0.2
_CLOSING_SECONDS = 15.0
_SHOWN_LINES = 10
_OWN = ("--for-starter", "--host", "127.0.0.1", "--port", "0")


class ServerEnded(Exception):
    """The server ended while it started, and has said why on standard error."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@contextmanager
def own_server(settings: ServeSettings, configuration: Path | None) -> Iterator[HttpServer]:
    """The context of a server that is ready. Raises ServerEnded if it does not get so far.

    While models load, the server tells of it on standard error. What it writes later is shown when the context ends.
    """
    given = ("--config", str(configuration)) if configuration else ()
    with temporary_folder() as folder:
        log = folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*module_command("orchestrator.cli.entry"), *given, "serve", *_OWN, *settings.words],
                env={**os.environ, **settings.environment, SERVERS_VARIABLE: str(folder)},
                stdin=subprocess.PIPE,
                stdout=output,
                # Ctrl-C is the program's.
                start_new_session=True,
            )
        told = ""
        try:
            print_notes(["Loading models ..."])
            yield _ready(process, folder)
            told = log.read_text(errors="replace")
        finally:
            _end(process)
        print_notes(_later(told))


def _ready(process: subprocess.Popen[bytes], folder: Path) -> HttpServer:
    server: HttpServer | None = None
    while (code := process.poll()) is None:
        if server is None:
            server = next((HttpServer(found.address, found.key) for found in running_servers(folder)), None)
        elif server.ready():
            _silence(process)
            return server
        time.sleep(_POLL_SECONDS)
    raise ServerEnded(code)


def _silence(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(b"\n")
        process.stdin.flush()


def _later(told: str) -> list[str]:
    lines = told.splitlines()
    return lines if len(lines) <= _SHOWN_LINES else ["...", *lines[-_SHOWN_LINES:]]


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    _silence(process)
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(_CLOSING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
