"""Errors in the shape that OpenAI's clients read. Pure."""

from collections.abc import Mapping
from typing import Any

from protocol.errors import InputError, PipelineError

_TYPES = {401: "authentication_error", 404: "invalid_request_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than 200; `str(error)` says what is wrong and what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}


def unsupported(param: str, message: str) -> ApiError:
    """For what the API knows and this server would have to fake."""
    return ApiError(400, message, code="unsupported_parameter", param=param)


def of_pipeline(error: PipelineError) -> ApiError:
    """What the pipeline refused, as an answer."""
    if isinstance(error, InputError):
        return ApiError(400, str(error), code="invalid_value")
    return ApiError(503, str(error), code="pipeline_failed", headers={"retry-after": "5"})
