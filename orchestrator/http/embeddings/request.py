"""The body of OpenAI's requests for embeddings. Pure."""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from orchestrator.http.errors import ApiError

MOST_INPUTS = 2048
"""Of one request, as OpenAI has it."""
Input: TypeAlias = str | Sequence[int]
"""A text, or its tokens."""
_Token = Annotated[int, Meta(ge=0)]


class EmbeddingRequest(msgspec.Struct):
    """OpenAI's. Raises ApiError 400 in `inputs`."""

    input: str | list[str | _Token | list[_Token]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None

    @property
    def inputs(self) -> list[Input]:
        return _inputs(self.input)


def _inputs(given: str | list[str | int | list[int]]) -> list[Input]:
    if isinstance(given, str):
        return [given]
    tokens = [each for each in given if isinstance(each, int)]
    if tokens and len(tokens) == len(given):
        return [tokens]
    found = [each for each in given if not isinstance(each, int)]
    if len(found) < len(given):
        raise ApiError(400, "`input` mixes tokens with texts: give one or the other.", param="input")
    return list(found)
