"""Errors in the forms of OpenAI's, Anthropic's and Ollama's APIs. Pure."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from orchestrator.api.client import NoPipeline
from protocol.errors import InputError, PipelineError

ANTHROPIC_VERSION = "anthropic-version"
"""The header by which clients of Anthropic's API are known on routes that both APIs have."""
RETRY_SECONDS = 5
"""When a request may come again that found no pipeline."""
_OPENAI_TYPES = {401: "authentication_error", 404: "invalid_request_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """A response with another status than 200; `str(error)` says what is wrong and what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        retry: float = 0.0,
    ) -> None:
        """`retry`: seconds after which the request is worth sending again; 0 if that is not known."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {}) | ({"retry-after": str(max(1, math.ceil(retry)))} if retry else {})

    def in_words_of(self, names: Mapping[str, str]) -> "ApiError":
        """This error in the words of an API whose fields, or fields of fields (text.format), have other `names`."""
        if self.param is None or self.param not in names:
            return self
        named = names[self.param]
        words = re.sub(rf"\b{self.param}\b", named, str(self))
        return ApiError(self.status, words, code=self.code, param=named.partition(".")[0], headers=self.headers)

    @property
    def type(self) -> str:
        return _OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def openai_body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(self)}}

    def ollama_body(self) -> dict[str, Any]:
        return {"error": str(self)}


def internal_error() -> ApiError:
    """What a client is told of an error that nobody foresaw; the caller logs its cause."""
    return ApiError(500, "The server failed at this request: its log has the cause.")


class PromptTooLong(ApiError):
    """The prompt leaves no room for an answer. Clients of both APIs read the numbers of their form."""

    def __init__(self, tokens: int, context: int, about: str = "") -> None:
        """`tokens` of the prompt, `about` before their number; `context`: tokens of prompt and answer together."""
        super().__init__(
            400,
            f"This model's maximum context length is {context} tokens, and the prompt has {about}{tokens}: shorten it.",
            code="context_length_exceeded",
        )
        self._anthropic = f"prompt is too long: {tokens} tokens > {context - 1} maximum"

    def anthropic_body(self) -> dict[str, Any]:
        return {"type": "error", "error": {"type": "invalid_request_error", "message": self._anthropic}}


def wrong(param: str | None, message: str) -> ApiError:
    """The error for a value that can't be read or answered."""
    return ApiError(400, message, code="invalid_value", param=param)


def unsupported(param: str, message: str) -> ApiError:
    """The error for a field of the API that this server does not implement."""
    return ApiError(400, message, code="unsupported_parameter", param=param)


def refuse_given(asked: object, names: Mapping[str, str], ignored: Collection[object] = ()) -> None:
    """Raises the error for the first field that asks for something. `names`: what to do instead, by field. `ignored`:
    further values that ask for nothing."""
    for name, instead in names.items():
        value = getattr(asked, name)
        if value and value not in ignored:
            raise unsupported(name, f"{name} is not supported: {instead}.")


def of_pipeline(error: PipelineError) -> ApiError:
    """The response to an error of the pipeline."""
    if isinstance(error, InputError):
        return wrong(None, str(error))
    if isinstance(error, NoPipeline):
        error = PipelineError("The pipeline ended during this request, or does not answer: send it again in a moment.")
    return ApiError(503, str(error), code="pipeline_failed", retry=RETRY_SECONDS)
