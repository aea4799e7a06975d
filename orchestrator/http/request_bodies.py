"""Decodes a request's body into a typed struct, with errors that name the wrong field. Pure; knows no API's fields."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from orchestrator.api.validation import out_of_range
from orchestrator.http.errors import ApiError

MOST_LEVELS = 256
"""Of nested arrays and objects. Bodies are rendered, stored and returned by functions that call themselves."""

S = TypeVar("S", bound=msgspec.Struct)


def decoded(body: bytes, kind: type[S]) -> S:
    """Raises ApiError 400 that names the wrong field or says that the body is not JSON, or is nested too deeply."""
    try:
        found = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong(error) from error
    except RecursionError as error:
        raise _too_deep() from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
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


def _too_deep() -> ApiError:
    return ApiError(400, f"The body is nested deeper than {MOST_LEVELS} levels: flatten it.", code="invalid_value")


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
    return ApiError(400, str(out_of_range(error)), code="invalid_value", param=_param(error))


def _param(error: msgspec.ValidationError) -> str | None:
    _, found, path = str(error).partition("`$.")
    return path.rstrip("`").split(".")[0].split("[")[0] if found else None
