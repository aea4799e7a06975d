"""The embedding model of a server: texts to tokens here, tokens to vectors in its process, one request at a time."""

import asyncio
import math
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from tokenizers import Encoding, Tokenizer

from orchestrator.http.embeddings.request import MOST_INPUTS, Input
from orchestrator.http.errors import ApiError
from orchestrator.http.settings import EmbeddingSettings, ServerSettings
from orchestrator.machine.embeddings.process import EmbeddingCommand, EmbeddingProcess
from protocol.errors import PipelineError

_MOST_WAITING = 64
_RETRY_SECONDS = 5
_NO_LIMIT = 1 << 20
"""Tokens of a model that states no limit."""


class Embedded(NamedTuple):
    vectors: Sequence[Sequence[float]]
    """One an input, of length 1."""
    tokens: int
    """Of all inputs."""


def embedding_model(settings: ServerSettings) -> "EmbeddingModel | None":
    """That of a server, if it has one."""
    return None if settings.embedding is None else EmbeddingModel(settings.embedding)


class EmbeddingModel:
    """Its process starts with the first request, ends when it is idle, and starts again after it has failed."""

    def __init__(
        self,
        settings: EmbeddingSettings,
        start: Callable[[EmbeddingCommand], EmbeddingProcess] = EmbeddingProcess,
    ) -> None:
        self.name = settings.name
        self.folder = settings.folder
        self._settings = settings
        self._start = start
        self._tokenizer = Tokenizer.from_file(str(settings.folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.context = _context(settings.folder)
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._process: EmbeddingProcess | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def loaded(self) -> bool:
        return self._process is not None

    async def embed(
        self, inputs: Sequence[Input], *, truncate: bool = False, dimensions: int | None = None
    ) -> Embedded:
        """Vectors in the order of `inputs`. `truncate`: what is too long is cut, not refused. `dimensions`: only the
        first ones.

        Raises ApiError: 400 for no, too many, empty or too long inputs, 429 if too many requests wait, 503 if the model
        fails.
        """
        if not 0 < len(inputs) <= MOST_INPUTS:
            raise _wrong(f"`input` holds {len(inputs)} inputs: give 1 to {MOST_INPUTS}.")
        if self._waiting >= _MOST_WAITING:
            raise ApiError(
                429,
                f"{self._waiting} requests wait for the embedding model: try again in a moment.",
                headers={"retry-after": str(_RETRY_SECONDS)},
            )
        self._waiting += 1
        try:
            async with self._lock:
                rows = await asyncio.to_thread(self._rows, inputs, truncate)
                vectors = await self._ask(rows)
        finally:
            self._waiting -= 1
        shortened = vectors if dimensions is None else [_shortened(vector, dimensions) for vector in vectors]
        return Embedded(shortened, sum(map(len, rows)))

    def close(self) -> None:
        """The server ends. A request in progress ends with an error."""
        self._closed = True
        self._stay()
        process, self._process = self._process, None
        if process is not None:
            # A thread may still read from it, which then closes it.
            (process.terminate if self._lock.locked() else process.close)()

    async def _ask(self, rows: Sequence[Sequence[int]]) -> list["array[float]"]:
        self._stay()
        # A thread can't be interrupted, so the lock is held until it is done although the client may leave.
        work = asyncio.ensure_future(asyncio.to_thread(self._computed, rows))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work})
            raise
        except PipelineError as error:
            raise ApiError(
                503, str(error), code="embedding_failed", headers={"retry-after": str(_RETRY_SECONDS)}
            ) from error
        finally:
            if self._settings.keep is not None and not self._closed:
                self._idle = asyncio.get_running_loop().call_later(self._settings.keep, self._rest)

    def _computed(self, rows: Sequence[Sequence[int]]) -> list["array[float]"]:
        process = self._process
        if process is not None and not process.running:
            process.close()
            process = None
        if process is None:
            process = self._start(self._settings.command)
        self._process = process
        try:
            return process.embed(rows)
        except PipelineError:
            # Whatever state it is in, the next request gets a fresh one.
            process.close()
            self._process = None
            raise
        finally:
            if self._closed:
                process.close()

    def _rest(self) -> None:
        """Nobody asked for a while: free the memory."""
        self._idle = None
        if self._process is not None and not self._lock.locked():
            process, self._process = self._process, None
            asyncio.get_running_loop().run_in_executor(None, process.close)

    def _stay(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _rows(self, inputs: Sequence[Input], truncate: bool) -> list[Sequence[int]]:
        texts = [each for each in inputs if isinstance(each, str)]
        encoded = iter(self._tokenizer.encode_batch_fast(texts))
        rows = [self._row(next(encoded) if isinstance(each, str) else each, truncate) for each in inputs]
        for place, row in enumerate(rows):
            if not row:
                raise _wrong(f"Input {place} is empty: give at least one token.")
            if len(row) > self.context:
                raise ApiError(
                    400,
                    f"This model's maximum context length is {self.context} tokens, and input {place} has {len(row)}: "
                    "shorten it.",
                    code="context_length_exceeded",
                    param="input",
                )
            if max(row) >= self._tokenizer.get_vocab_size():
                raise _wrong(f"Input {place} holds token {max(row)}, which the model does not know.")
        return rows

    def _row(self, found: Encoding | Sequence[int], truncate: bool) -> Sequence[int]:
        if not isinstance(found, Encoding):
            return found[: self.context] if truncate else found
        if truncate and len(found.ids) > self.context:
            # The tokens that end a text stay at its end.
            last = _trailing(found.special_tokens_mask)
            return [*found.ids[: self.context - last], *found.ids[len(found.ids) - last :]]
        return found.ids


def _shortened(vector: Sequence[float], dimensions: int) -> Sequence[float]:
    """The first dimensions, of length 1 again. Raises ApiError 400 for more dimensions than there are."""
    if dimensions > len(vector):
        raise _wrong(f"`dimensions` is {dimensions}, and this model's vectors have {len(vector)}.", "dimensions")
    first = list(vector[:dimensions])
    length = math.hypot(*first) or 1.0
    return [value / length for value in first]


def _wrong(message: str, param: str = "input") -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)


def _trailing(mask: Sequence[int]) -> int:
    """Ones at the end of `mask`."""
    return next((place for place, special in enumerate(reversed(mask)) if not special), len(mask))


class _Limits(msgspec.Struct):
    max_position_embeddings: int | None = None
    model_type: str = ""
    pad_token_id: int | None = None
    max_seq_length: int | None = None


def _context(folder: Path) -> int:
    """Tokens of an input at most: what sentence-transformers' file says, else the model's positions."""
    own = _limits(folder / "sentence_bert_config.json").max_seq_length
    if own:
        return own
    limits = _limits(folder / "config.json")
    positions = limits.max_position_embeddings or _NO_LIMIT
    # RoBERTa's first position is the one behind its padding token.
    return positions - (limits.pad_token_id or 1) - 1 if "roberta" in limits.model_type else positions


def _limits(file: Path) -> _Limits:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Limits)
    except (OSError, msgspec.DecodeError):
        return _Limits()
