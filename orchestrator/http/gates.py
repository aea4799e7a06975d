"""ASGI middlewares in front of every route: they check framing, host, key, content type and size of a request.

The host is checked because of browsers: a foreign page can let its own host name resolve to this machine (DNS
rebinding), and its requests then carry that name. IP addresses can't be rebound, so all of them pass.
"""

import hmac
import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.http.errors import ApiError

OPEN = frozenset({"/health", "/"})
"""Routes that need no key: the health, and the page, which asks the user for the key."""
MESSAGES = "/v1/messages"
"""Prefix of Anthropic's routes, whose errors have another form."""
OLLAMA = "/api/"
"""Prefix of Ollama's routes, whose errors have a third form."""


_UNTYPED = ("", "application/x-www-form-urlencoded")
"""Types of bodies whose sender chose none: curl's own is the second one."""
_OF_BROWSERS = frozenset(("origin", "referer", "cookie", "sec-fetch-site", "sec-fetch-mode"))
"""Headers by which browsers show themselves."""


def refusal(error: ApiError, path: str) -> JSONResponse:
    """The response to an error, in the form of the API that `path` belongs to."""
    if path.startswith(MESSAGES):
        body = error.anthropic_body()
    else:
        body = error.ollama_body() if path.startswith(OLLAMA) else error.openai_body()
    return JSONResponse(body, error.status, error.headers)


def shows_key(headers: Headers, key: str | None) -> bool:
    """Whether one of the request's headers carries the key, or the server has none."""
    if key is None:
        return True
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    bearer = credentials.strip() if scheme.lower() == "bearer" else scheme
    return any(hmac.compare_digest(given.encode(), key.encode()) for given in (bearer, headers.get("x-api-key", "")))


class FrontGate:
    """Refuses requests whose Host header names another server, and those with two statements of where their body ends,
    or with one that their version does not have: a proxy may believe the other one and take a part of the body for a
    request (RFC 9112, sections 6.1 and 6.3)."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower().rstrip(".") for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope) if scope["type"] == "http" else None
        await (self._app if error is None else refusal(error, scope["path"]))(scope, receive, send)

    def _error(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if "transfer-encoding" in headers and ("content-length" in headers or scope["http_version"] < "1.1"):
            return ApiError(
                400,
                "Send Content-Length, or Transfer-Encoding with HTTP/1.1: never both, and no Transfer-Encoding with "
                "HTTP/1.0.",
                code="ambiguous_length",
                headers={"connection": "close"},
            )
        if not self._admits(headers.get("host", "")):
            message = "This server does not accept that host name: add it with --allow-host NAME."
            return ApiError(403, message, code="host_not_allowed")
        return None

    def _admits(self, host: str) -> bool:
        name = _without_port(host).lower().rstrip(".")
        return name in self._names or _is_address(name)


class KeyGate:
    """Requires the key, JSON bodies, and bodies of a bounded size."""

    def __init__(self, app: ASGIApp, key: str | None, most_bytes: int, origins: Collection[str]) -> None:
        """`key`: None admits every request, but those that a web page of another origin than `origins` causes."""
        self._app = app
        self._key = key
        self._origins = frozenset(origins)
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await refusal(error, scope["path"])(scope, receive, send)
            return
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._most_bytes:
                raise _too_long(self._most_bytes)
            return message

        await self._app(scope, bounded, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if scope["path"] not in OPEN:
            if not shows_key(headers, self._key):
                raise ApiError(
                    401,
                    "The API key is missing or wrong: send the header `Authorization: Bearer KEY`.",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
            if self._key is None and self._foreign(headers):
                raise ApiError(
                    403,
                    "This server does not answer that web page: add its address with --allow-origin URL.",
                    code="origin_not_allowed",
                )
        # A web page may send other types without a preflight request.
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        known = kind == "application/json" or (kind in _UNTYPED and not self._from_page(headers))
        if scope["method"] == "POST" and not known:
            raise ApiError(415, "Send JSON, with the header `Content-Type: application/json`.", code="not_json")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self._most_bytes:
            raise _too_long(self._most_bytes)

    def _from_page(self, headers: Headers) -> bool:
        """Whether a web page may have caused the request. None knows the key."""
        browser = headers.get("user-agent", "").startswith("Mozilla/")
        return self._key is None and (browser or not _OF_BROWSERS.isdisjoint(headers.keys()))

    def _foreign(self, headers: Headers) -> bool:
        """Whether a browser says that a page of another site, or of another port, caused the request."""
        if headers.get("sec-fetch-site") not in ("cross-site", "same-site"):
            return False
        return self._origins.isdisjoint((headers.get("origin"), "*"))


def _too_long(most: int) -> ApiError:
    return ApiError(413, f"The body is longer than {most:,} bytes: shorten it.", code="body_too_long")


def _without_port(host: str) -> str:
    if host.startswith("["):
        address, _, rest = host[1:].partition("]")
        # Text behind the bracket that is no port makes it another name.
        return host if rest and not rest.startswith(":") else address
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
