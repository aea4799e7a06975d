"""The live page: one document, and the headers that isolate it. Does not know what the page shows."""

import base64
import hashlib
import re
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

_INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


@cache
def document() -> str:
    """The HTML document with its inline style and script; it requests only this server's own routes."""
    return (resources.files(__name__) / "index.html").read_text(encoding="utf-8")


def policy(html: str) -> str:
    """The Content-Security-Policy that allows only the inline style and script of `html`.

    Trusted Types: even the page's own script can't turn text into markup or code.
    """
    hashes: dict[str, list[str]] = {"style": [], "script": []}
    for kind, content in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    rules = {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "style-src": " ".join(hashes["style"]),
        "script-src": " ".join(hashes["script"]),
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


async def page(request: Request) -> Response:
    """The document. It needs no key: it holds no private data, and asks the user for the key. Clients of Ollama's look
    for its server here."""
    if request.headers.get("user-agent", "").startswith("ollama"):
        return Response("Ollama is running", media_type="text/plain")
    html = document()
    headers = {
        "content-security-policy": policy(html),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }
    return Response(html, media_type="text/html", headers=headers)
