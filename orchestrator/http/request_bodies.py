"""Decodes a request's body into a typed struct, with errors that name the wrong field. Pure; knows no API's fields."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from orchestrator.api.validation import out_of_range
from orchestrator.http.errors import ApiError

S = TypeVar("S", bound=msgspec.Struct)


def decoded(body: bytes, kind: type[S]) -> S:
    """Raises ApiError 400 that names the wrong field or says that the body is not JSON."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from error


def converted(fields: Mapping[str, Any], kind: type[S]) -> S:
    """As `decoded`, from the fields of another API's body; a field that is None counts as absent."""
    try:
        return msgspec.convert({name: value for name, value in fields.items() if value is not None}, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong(error) from error


def _wrong(error: msgspec.ValidationError) -> ApiError:
    return ApiError(400, str(out_of_range(error)), code="invalid_value", param=_param(error))


def _param(error: msgspec.ValidationError) -> str | None:
    _, found, path = str(error).partition("`$.")
    return path.rstrip("`").split(".")[0].split("[")[0] if found else None
