"""Vectors of texts by an embedding model: /v1/embeddings, and the model behind it.

Texts become tokens here, tokens become vectors in the model's process, one request at a time.
"""

import asyncio
import base64
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tokenizers import Encoding, Tokenizer

from orchestrator.http.embedding_process import EmbeddingProcess
from orchestrator.http.errors import RETRY_SECONDS, ApiError, wrong
from orchestrator.http.request_bodies import decoded, read_body
from orchestrator.http.settings import EmbeddingCommand, EmbeddingSettings
from orchestrator.http.work import AdmissionLimit, in_thread, unless_gone
from orchestrator.text.tokenizer import MOST_CHARACTERS
from protocol.contracts.model_folder import ModelFolder
from protocol.contracts.tokenizer_fingerprint import tokenizer_file
from protocol.errors import PipelineError

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


_NO_LIMIT = 1 << 20
"""Tokens of a model that states no limit."""
_STOPPED = "The server was stopped during this request: send it again later."


class Embedded(NamedTuple):
    vectors: Sequence[Sequence[float]]
    """One an input, of length 1."""
    tokens: int
    """Of all inputs."""


class EmbeddingModel:
    """Its process starts with the first request, ends when it is idle, and starts again after it has failed."""

    def __init__(
        self,
        settings: EmbeddingSettings,
        limit: AdmissionLimit,
        start: Callable[[EmbeddingCommand], EmbeddingProcess] = EmbeddingProcess,
    ) -> None:
        self.name = settings.name
        self.folder = settings.folder
        self._settings = settings
        self._limit = limit
        self._start = start
        self._tokenizer = Tokenizer.from_buffer(tokenizer_file(settings.folder))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        folder = ModelFolder(settings.folder)
        config = folder.settings("config.json")
        self.context = _context(config, folder)
        # MLX reads beyond the rows of its embeddings for a token beyond them.
        self._vocabulary = _number(config, "vocab_size") or 1 + max(self._tokenizer.get_vocab().values())
        self._lock = asyncio.Lock()
        self._process: EmbeddingProcess | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._computing = False
        self._closed = False

    @property
    def loaded(self) -> bool:
        return self._process is not None and self._process.ready

    async def embed(
        self, inputs: Sequence[Input], *, truncate: bool = False, dimensions: int | None = None
    ) -> Embedded:
        """Vectors in the order of `inputs`. `truncate`: what is too long is cut, not refused. `dimensions`: only the
        first ones.

        Raises ApiError: 400 for no, too many, empty or too long inputs, 429 if no place is free, 503 if the model
        fails.
        """
        if not 0 < len(inputs) <= MOST_INPUTS:
            raise wrong("input", f"`input` holds {len(inputs)} inputs: give 1 to {MOST_INPUTS}.")
        with self._limit.take(1):
            async with self._lock:
                self._require_open()
                self._stay()
                try:
                    rows = await in_thread(self._rows, inputs, truncate)
                    vectors = await self._ask(rows)
                finally:
                    self._leave()
        if dimensions is not None:
            vectors = await asyncio.to_thread(_shortened, vectors, dimensions)
        return Embedded(vectors, sum(map(len, rows)))

    def close(self) -> None:
        """The server ends. A request in progress ends with an error."""
        self._closed = True
        self._stay()
        process, self._process = self._process, None
        if process is not None:
            # A thread may still read from it, which then closes it.
            (process.terminate if self._computing else process.close)()

    async def _ask(self, rows: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
        self._require_open()
        self._computing = True
        try:
            return await in_thread(self._computed, rows)
        except PipelineError as error:
            raise ApiError(503, str(error), code="embedding_failed", retry=RETRY_SECONDS) from error
        finally:
            self._computing = False

    def _computed(self, rows: Sequence[Sequence[int]]) -> list["array[float]"]:
        process = self._process
        if process is not None and not process.running:
            process.close()
            process = None
        self._process = process = process or self._start(self._settings.command)
        try:
            # `close` sets this before it looks for the process, so a process that it missed ends here.
            if self._closed:
                raise PipelineError(_STOPPED)
            return process.embed(rows)
        except BaseException:  # whatever state the process is in, the next request gets a fresh one
            process.close()
            self._process = None
            raise
        finally:
            if self._closed:
                process.close()

    def _require_open(self) -> None:
        """Raises ApiError 503 once the server ends."""
        if self._closed:
            raise ApiError(503, _STOPPED)

    def _rest(self) -> None:
        """Nobody asked for a while: free the memory."""
        self._idle = None
        if self._process is not None:
            process, self._process = self._process, None
            asyncio.get_running_loop().run_in_executor(None, process.close)

    def _leave(self) -> None:
        if self._settings.keep is not None and not self._closed:
            self._idle = asyncio.get_running_loop().call_later(self._settings.keep, self._rest)

    def _stay(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _rows(self, inputs: Sequence[Input], truncate: bool) -> list[Sequence[int]]:
        most = MOST_CHARACTERS * self.context
        texts = [each[: most + 1] if truncate else each for each in inputs if isinstance(each, str)]
        for place, each in enumerate(inputs):
            if isinstance(each, str) and len(each) > most and not truncate:
                raise self._too_long(place, f"{len(each):,} characters")
        encoded = iter(self._tokenizer.encode_batch_fast(texts))
        rows = [self._row(next(encoded) if isinstance(each, str) else each, truncate) for each in inputs]
        for place, row in enumerate(rows):
            if not row:
                raise wrong("input", f"Input {place} is empty: give at least one token.")
            if len(row) > self.context:
                raise self._too_long(place, str(len(row)))
            if max(row) >= self._vocabulary:
                raise wrong("input", f"Input {place} holds token {max(row)}, which the model does not know.")
        return rows

    def _too_long(self, place: int, length: str) -> ApiError:
        return ApiError(
            400,
            f"This model's maximum context length is {self.context} tokens, and input {place} has {length}: "
            "shorten it.",
            code="context_length_exceeded",
            param="input",
        )

    def _row(self, found: Encoding | Sequence[int], truncate: bool) -> Sequence[int]:
        if not isinstance(found, Encoding):
            return found[: self.context] if truncate else found
        if truncate and len(found.ids) > self.context:
            # The tokens that end a text stay at its end.
            last = _trailing(found.special_tokens_mask)
            return [*found.ids[: self.context - last], *found.ids[len(found.ids) - last :]]
        return found.ids


def _shortened(vectors: Sequence[Sequence[float]], dimensions: int) -> list[list[float]]:
    """The first dimensions, of length 1 again. Raises ApiError 400 for more dimensions than there are."""
    if dimensions > len(vectors[0]):
        raise wrong("dimensions", f"`dimensions` is {dimensions}, and this model's vectors have {len(vectors[0])}.")
    return [_normal(vector[:dimensions]) for vector in vectors]


def _normal(vector: Sequence[float]) -> list[float]:
    length = math.hypot(*vector) or 1.0
    return [value / length for value in vector]


def _trailing(mask: Sequence[int]) -> int:
    """Ones at the end of `mask`."""
    return next((place for place, special in enumerate(reversed(mask)) if not special), len(mask))


def _context(config: Mapping[str, Any], folder: ModelFolder) -> int:
    """Tokens of an input at most: the model's positions, or fewer if sentence-transformers' file says so."""
    positions = _number(config, "max_position_embeddings") or _NO_LIMIT
    if "roberta" in str(config.get("model_type", "")):
        # RoBERTa's first position is the one behind its padding token.
        positions -= (_number(config, "pad_token_id") or 1) + 1
    return min(positions, _number(folder.settings("sentence_bert_config.json"), "max_seq_length") or positions)


def _number(settings: Mapping[str, Any], name: str) -> int | None:
    value = settings.get(name)
    return value if isinstance(value, int) else None


def embedding_routes(model: EmbeddingModel | None) -> list[Route]:
    """Without a model the route says that there is none."""

    async def embeddings(request: Request) -> Response:
        question, inputs = await read_body(request, _read)
        asked = named(model, question.model)
        found = await unless_gone(request, asked.embed(inputs, dimensions=question.dimensions))
        return await asyncio.to_thread(_answer, asked.name, found, question.encoding_format == "base64")

    return [Route("/v1/embeddings", embeddings, methods=["POST"])]


def named(model: EmbeddingModel | None, name: str | None) -> EmbeddingModel:
    """The server's embedding model, for a request that names it or none. Raises ApiError 501 without a model, 404 for
    another name."""
    if model is None:
        raise ApiError(
            501, "This server has no embedding model: start it with --embedding-model.", code="no_embedding_model"
        )
    if name is not None and name != model.name:
        raise ApiError(
            404,
            f"This server has no such embedding model: ask for {model.name}.",
            code="model_not_found",
            param="model",
        )
    return model


def json_response(content: Any) -> Response:
    """Many numbers take a while: for a thread."""
    return Response(msgspec.json.encode(content), media_type="application/json")


def _read(content: bytes) -> tuple[EmbeddingRequest, Sequence[Input]]:
    question = decoded(content, EmbeddingRequest)
    return question, question.inputs


def _answer(name: str, found: Embedded, packed: bool) -> Response:
    data = [
        {"object": "embedding", "index": index, "embedding": _base64(vector) if packed else list(vector)}
        for index, vector in enumerate(found.vectors)
    ]
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    return json_response({"object": "list", "data": data, "model": name, "usage": usage})


def _base64(vector: Sequence[float]) -> str:
    """Float32, little-endian, as OpenAI has it."""
    return base64.b64encode(array("f", vector).tobytes()).decode()
