"""A llama-server without a model: it answers `/health` and `/completion` as llama.cpp's does.

It continues any prompt with 1, 2, 3, ..., two tokens a piece, and says that it drafted half of them. `FAKE_LLAMA` in
its environment is an option that it does not know. Arguments: those of llama-server.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._begin()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._begin()
        count = asked["n_predict"]
        for first in range(1, count + 1, 2):
            self._piece({"tokens": list(range(first, min(count, first + 1) + 1))})
        drafts = {"draft_n": count, "draft_n_accepted": count // 2}
        # Without a cached prompt, its reading takes a second.
        prompt_ms = 100.0 if asked["cache_prompt"] else 1000.0
        self._piece({"timings": {"prompt_ms": prompt_ms, "predicted_n": count, "predicted_ms": 900.0, **drafts}})

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""

    def _begin(self) -> None:
        self.send_response(200)
        self.end_headers()

    def _piece(self, piece: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())


def main() -> None:
    words = sys.argv[1:]
    if os.environ.get("FAKE_LLAMA") in words:
        sys.exit(f"error: invalid argument: {os.environ['FAKE_LLAMA']}")
    port = int(words[words.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), _Handler).serve_forever()


if __name__ == "__main__":
    main()
