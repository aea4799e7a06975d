"""POST /v1/completions: what may be asked. Pure."""

from typing import Annotated, Any

from msgspec import Meta

from orchestrator.http.errors import ApiError, unsupported
from orchestrator.http.openai.chat_request import IGNORED, MOST_CHOICES, GenerationRequest
from orchestrator.http.openai.structured_output import response_grammar
from protocol.messages.base import Token
from protocol.messages.grammar import Grammar


class CompletionRequest(GenerationRequest, kw_only=True):
    """None is what clients send for "not given"."""

    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    prompt: str | tuple[str | Token | tuple[Token, ...], ...]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | bool | None = None
    echo: bool | None = None
    suffix: Any = None
    best_of: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    response_format: Any = None

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        """Each one gets its own choices. A list of ids is one prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if any(isinstance(each, int) for each in self.prompt):
            ids = tuple(each for each in self.prompt if isinstance(each, int))
            if len(ids) < len(self.prompt):
                raise ApiError(400, "prompt mixes token ids with texts or lists: send one kind.", param="prompt")
            return [ids]
        return [each for each in self.prompt if not isinstance(each, int)]

    @property
    def prompt_count(self) -> int:
        """As the first element has it; a mixed list is refused by `prompts`."""
        return 1 if isinstance(self.prompt, str) or isinstance(next(iter(self.prompt), None), int) else len(self.prompt)

    @property
    def limit(self) -> int | None:
        # The pipeline generates at least one token.
        return 1 if self.silent else self.max_tokens

    @property
    def silent(self) -> bool:
        """The client wants nothing but its prompt back."""
        return self.max_tokens == 0

    @property
    def prompt_logprobs(self) -> bool:
        return bool(self.echo) and self.told is not None

    @property
    def choices(self) -> int:
        return max(self.returned, self.best_of or 0)

    @property
    def returned(self) -> int:
        """Choices that the client gets of each prompt, the best ones."""
        return self.n or 1

    @property
    def told(self) -> int | None:
        """As `alternatives`, of what the client is told. 0 asks for the chosen tokens' alone."""
        return None if self.logprobs is False or self.logprobs is None else int(self.logprobs)

    @property
    def alternatives(self) -> int | None:
        chooses = self.choices > self.returned
        return 0 if self.told is None and chooses else self.told

    @property
    def grammar(self) -> Grammar | None:
        """What the answers are held to. Raises ApiError."""
        return None if self.response_format in IGNORED else response_grammar(self.response_format)

    def refuse_unsupported(self) -> None:
        self.grammar  # noqa: B018 - raises
        if self.suffix not in (None, False, ""):
            raise unsupported(
                "suffix", "suffix is not supported, because texts are continued at their end: leave it out."
            )
        if self.stream and (self.silent or self.prompt_logprobs):
            raise unsupported("stream", "An echo with logprobs, or with max_tokens 0, comes whole: leave out stream.")
        if self.best_of is not None and self.best_of < self.returned:
            raise ApiError(400, "best_of must be at least n.", code="invalid_value", param="best_of")
        if self.choices > self.returned and self.stream:
            raise ApiError(
                400, "best_of chooses among whole answers: leave out stream.", code="invalid_value", param="best_of"
            )
