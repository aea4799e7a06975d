"""Reads a request's body into a typed struct, with errors that name the wrong field. Knows no API's fields.

Long bodies are read beside the event loop.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

import msgspec
from msgspec import structs
from starlette.requests import Request

from orchestrator.api.validation import out_of_range
from orchestrator.http.errors import ApiError, wrong
from orchestrator.http.work import body, in_thread, unless_gone
from protocol.messages.base import MAX_CONTEXT

MOST_LEVELS = 256
"""Of nested arrays and objects. Bodies are rendered, stored and returned by functions that call themselves."""

MOST_CONTAINERS = 1 << 16
"""Arrays and objects of a body. The decoder holds the interpreter's lock until it has made them all."""
MOST_VALUES = MAX_CONTEXT + MOST_CONTAINERS
"""Of a body, about: the longest prompt in tokens, and what is around it."""
_SLICE = 1 << 16
"""Bytes that are searched before other threads may run."""

S = TypeVar("S", bound=msgspec.Struct | dict[str, Any])


HALVED = "Half a character became U+FFFD: a text was cut in the middle of an emoji or another long character."


def decoded(body: bytes, kind: type[S], repaired: list[str] | None = None) -> S:
    """Raises ApiError 400 that names the wrong field or says that the body is not JSON, or beyond the bounds.

    `repaired` grows by HALVED if characters were replaced."""
    _require_bounds(body)
    try:
        found = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong(error) from error
    except RecursionError as error:
        raise _too_deep() from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if (whole := _with_whole_characters(body)) != body:
            if repaired is not None and whole != body.removeprefix(_MARK):
                repaired.append(HALVED)
            return decoded(whole, kind)
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from error
    # Most bodies have fewer brackets, so their depth need not be measured.
    if body.count(b"[") + body.count(b"{") > MOST_LEVELS and _deeper(found, MOST_LEVELS):
        raise _too_deep()
    return found


def converted(fields: Mapping[str, Any], kind: type[S]) -> S:
    """As `decoded`, from the fields of another API's body; a field that is None counts as absent."""
    try:
        return msgspec.convert({name: value for name, value in fields.items() if value is not None}, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong(error) from error


_MARK = b"\xef\xbb\xbf"
"""Of UTF-8, with which some programs begin a text."""
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u[dD][89a-fA-F]..|.)", re.DOTALL)
_HALF_BYTES = 6
"""Of the escape for half a character."""


def _with_whole_characters(body: bytes) -> bytes:
    """Without a byte-order mark, and with U+FFFD for half a character: clients cut texts at any place."""
    body = body.removeprefix(_MARK).decode(errors="replace").encode()
    return _ESCAPE.sub(lambda found: rb"\ufffd" if len(found[0]) == _HALF_BYTES else found[0], body)


def _require_bounds(body: bytes) -> None:
    """Raises ApiError for a body with more containers or values than are decoded."""
    # Most bodies have fewer such characters, so that nobody needs to know which ones are in texts.
    if body.count(b"[") + body.count(b"{") <= MOST_CONTAINERS and body.count(b",") <= MOST_VALUES:
        return
    containers, commas = 0, 0
    for outside in _outside_texts(body):
        containers += outside.count(b"[") + outside.count(b"{")
        commas += outside.count(b",")
    if containers > MOST_CONTAINERS:
        raise wrong(
            None, f"The body has more than {MOST_CONTAINERS:,} lists and objects: send fewer messages, parts or tools."
        )
    if commas > MOST_VALUES:
        raise wrong(None, f"The body has more than {MOST_VALUES:,} values: send fewer.")


def _outside_texts(body: bytes) -> Iterator[bytes]:
    """What is outside of the texts of a JSON body."""
    body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    inside = 0
    for begin in range(0, len(body), _SLICE):
        pieces = body[begin : begin + _SLICE].split(b'"')
        yield b"".join(pieces[inside::2])
        inside = (inside + len(pieces) - 1) % 2


def _too_deep() -> ApiError:
    return wrong(None, f"The body is nested deeper than {MOST_LEVELS} levels: flatten it.")


def _deeper(value: Any, most: int) -> bool:
    """Whether `value` has more than `most` levels."""
    level = [value]
    for _ in range(most):
        level = [inner for outer in level for inner in _inside(outer) if isinstance(inner, _CONTAINERS)]
        if not level:
            return False
    return True


def _inside(container: Any) -> Iterable[Any]:
    if isinstance(container, msgspec.Struct):
        return structs.astuple(container)
    return container.values() if isinstance(container, dict) else container


_CONTAINERS = (dict, list, tuple, msgspec.Struct)


def _wrong(error: msgspec.ValidationError) -> ApiError:
    _, found, path = str(error).partition("`$.")
    return wrong(path.rstrip("`").split(".")[0].split("[")[0] if found else None, str(out_of_range(error)))


_SHORT_BYTES = 1 << 14
"""Such a body is read at once."""
_LONG_BYTES = 1 << 16
"""Longer ones take turns, because what they become takes up to 20 times their length in memory."""

T = TypeVar("T")


async def read_body(request: Request, read: Callable[[bytes], T], *, aside: bool = False) -> T:
    """What `read` makes of the request's body; raises what `read` raises. `aside`: in a thread, however short."""
    content = await body(request)
    if len(content) <= _SHORT_BYTES and not aside:
        return read(content)
    turn: asyncio.Lock | None = request.app.state.long_bodies if len(content) > _LONG_BYTES else None

    async def reading() -> T:
        async with turn or nullcontext():
            return await in_thread(read, content)

    return await unless_gone(request, reading())
