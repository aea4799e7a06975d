"""Clients of a running pipeline, blocking or with asyncio. One socket a call, so that threads need no lock."""

import uuid
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any, cast, overload

import zmq
import zmq.asyncio

from orchestrator.api.batch import Batch, Prompt, Prompts, is_batch, submits
from orchestrator.api.chat_prompts import chat_prompt
from orchestrator.api.ineffective import IneffectiveOption, ineffective
from orchestrator.api.result import Chosen, OutputCollector, Result
from orchestrator.api.sampling_params import SamplingParams
from protocol.errors import InputError, PipelineError, blaming
from protocol.messages.base import SequenceId
from protocol.messages.client import Cancel, Inquire, PipelineState, Refused, Submit, ToClient
from protocol.messages.telemetry import TelemetryFrame, ToClientOrSubscriber, Watch
from protocol.transport.codec import Stamp, decode, encode
from protocol.transport.link import Link
from protocol.transport.sockets import connected_dealer

_DEFAULTS = SamplingParams()
_JUDGED = ("temperature", "top_p", "top_k", "min_p", "seed", "verification", "repetition_penalty", "repetition_context")
"""Parameters that rules about options without effect look at."""
STAMP = Stamp(0, 0)
"""Clients belong to no life of the orchestrator."""
_GLANCE = 0.25
"""Seconds between checks whether the pipeline still runs."""
_SILENCE = 2.0
"""Seconds without a message after which a pipeline is asked whether it still runs."""
_ANSWER = 3.0
"""Seconds for the answer to that."""


class NoPipeline(PipelineError):
    """No pipeline answers at an address."""

    def __init__(self, address: str) -> None:
        super().__init__(f"No pipeline answers at {address}: start one there.")
        self.address = address


class Client:
    """Talks to the pipeline at `address`, for instance "tcp://127.0.0.1:5570"."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._context: zmq.Context[Any] = zmq.Context.instance()

    def state(self, wait: float = _ANSWER) -> PipelineState:
        """What the pipeline is. Raises PipelineError if the pipeline does not answer within `wait` seconds."""
        link = self._link()
        try:
            link.send(Inquire())
            for message in link.receive(wait):
                if isinstance(message, PipelineState):
                    return message
        finally:
            link.close()
        raise NoPipeline(self.address)

    def chat_prompt(self, text: str) -> list[int]:
        """`text` as the only message of a conversation, in tokens for `generate` and `stream`.

        Raises InputError if the target has no chat template, or is not on this machine.
        """
        return chat_prompt(self.state().target, text)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> "Stream":
        """Continue `prompt`: an iterator over pieces of text, with `.result` at its end."""
        return self._open(_submit(prompt, params))

    @overload
    def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Result: ...
    @overload
    def generate(
        self, prompt: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]: ...
    def generate(
        self, prompt: Prompt | Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Result | list[Result]:
        """Continue `prompt` and return all of it with its figures.

        A list of prompts gives a list of results in the same order; `params` are then for all, or one for each. The
        requests are decoded together. If one fails, or the call is interrupted, the others are cancelled.
        """
        if is_batch(prompt):
            return self._generate_all(prompt, params)
        with self._open(_submit(prompt, _one(params))) as stream:
            for _ in stream:
                pass
            assert stream.result is not None
            return stream.result

    def _generate_all(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Result]:
        batch = Batch(submits(prompts, params, _names(len(prompts))))
        if (results := batch.results) is not None:
            return results
        link = self._link()
        try:
            messages = _received(link, self._check)
            while (results := batch.results) is None:
                for submit in batch.due():
                    link.send(submit)
                for message in next(messages):
                    batch.feed(message)
            return results
        finally:
            for cancel in batch.cancellations():
                link.send(cancel)
            link.close()

    def _open(self, submit: Submit) -> "Stream":
        return Stream(self._link(), submit, self._check)

    def _link(self) -> Link:
        return Link(self._context, self.address, STAMP, ToClient)

    def _check(self, silent: float) -> float:
        """Seconds since the pipeline's last message, `silent` before the check. Raises PipelineError if it is gone."""
        if silent < _SILENCE:
            return silent
        self.state()
        return 0.0


class Stream:
    """Pieces of text as they come. Closing it early cancels the request."""

    def __init__(self, link: Link, submit: Submit, check: Callable[[float], float]) -> None:
        self._link = link
        self._request = submit.request
        self._reply = OutputCollector(submit.request, submit.sampling.seed)
        self._check = check
        self._pieces = self._run(submit)

    @property
    def result(self) -> Result | None:
        """The whole generation with its figures, once the last piece has come."""
        return self._reply.result

    @property
    def tokens(self) -> int:
        """Number of tokens so far."""
        return self._reply.tokens

    @property
    def hit_rate(self) -> float | None:
        """Share of hits among the rounds so far; None for a strategy without hits."""
        return self._reply.hit_rate

    @property
    def chosen(self) -> Sequence[Chosen]:
        """Tokens so far with their likelihoods, if they were asked for."""
        return self._reply.chosen

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def cancel(self) -> None:
        """Ask the pipeline to end the request; the iterator then ends with what there is."""
        self._link.send(Cancel(self._request))

    def close(self) -> None:
        """Cancel the request if it is unfinished, and close the socket."""
        if not self._link.closed:
            if self.result is None:
                self.cancel()
            self._link.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, submit: Submit) -> Iterator[str]:
        self._link.send(submit)
        try:
            messages = _received(self._link, self._check)
            while self.result is None:
                yield from filter(None, map(self._reply.feed, next(messages)))
        finally:
            self.close()


class AsyncClient:
    """The same with asyncio: `async for piece in client.stream(prompt, params)`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._context = zmq.asyncio.Context()

    async def state(self, wait: float = _ANSWER) -> PipelineState:
        """What the pipeline is. Raises PipelineError if nobody answers within `wait` seconds."""
        socket = connected_dealer(self._context, self.address)
        try:
            await socket.send(encode(Inquire(), STAMP))
            while await socket.poll(int(wait * 1000)):
                _, message = decode(await socket.recv(), ToClient)
                if isinstance(message, PipelineState):
                    return message
        finally:
            socket.close(linger=0)
        raise NoPipeline(self.address)

    @overload
    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Result: ...
    @overload
    async def generate(
        self, prompt: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]: ...
    async def generate(
        self, prompt: Prompt | Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Result | list[Result]:
        """Continue `prompt`, or each of a list of prompts, as `Client.generate` does."""
        if is_batch(prompt):
            return await self._generate_all(prompt, params)
        stream = AsyncStream(self._context, self.address, _submit(prompt, _one(params)))
        async for _ in stream:
            pass
        assert stream.result is not None
        return stream.result

    async def _generate_all(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Result]:
        batch = Batch(submits(prompts, params, _names(len(prompts))))
        if (results := batch.results) is not None:
            return results
        socket = connected_dealer(self._context, self.address)
        try:
            while (results := batch.results) is None:
                for submit in batch.due():
                    await socket.send(encode(submit, STAMP))
                _, message = decode(await _next_frame(socket, self.address), ToClient)
                batch.feed(message)
            return results
        finally:
            for cancel in batch.cancellations():
                await socket.send(encode(cancel, STAMP))
            socket.close(linger=1000)

    async def chat_prompt(self, text: str) -> list[int]:
        """`text` as the only message of a conversation, as `Client.chat_prompt` does."""
        return chat_prompt((await self.state()).target, text)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> "AsyncStream":
        """Continue `prompt`: an asynchronous iterator over pieces of text, with `.result` at its end."""
        return AsyncStream(self._context, self.address, _submit(prompt, params))

    async def watch(self, sequence: SequenceId | None = None) -> AsyncGenerator[TelemetryFrame, None]:
        """Telemetry frames: at most 20 a second, and about one a second if nothing happens.

        `sequence` is the request to show in detail; None is the latest. A slow reader misses frames. Raises
        PipelineError if no pipeline answers, or if its address is not this user's private one.
        """
        socket = connected_dealer(self._context, self.address)
        after = 0
        try:
            while True:
                await socket.send(encode(Watch(after, sequence), STAMP))
                if not await socket.poll(int(_ANSWER * 1000)):
                    raise NoPipeline(self.address)
                _, answer = decode(await socket.recv(), ToClientOrSubscriber)
                if isinstance(answer, Refused):
                    raise blaming(answer.blame, answer.text)
                if isinstance(answer, TelemetryFrame):
                    after = answer.serial
                    yield answer
        finally:
            socket.close(linger=0)

    def close(self) -> None:
        self._context.destroy(linger=0)


class AsyncStream:
    """Pieces of text as they come; leaving the loop early cancels the request."""

    def __init__(self, context: zmq.asyncio.Context, address: str, submit: Submit) -> None:
        self._address = address
        self._socket = connected_dealer(context, address)
        self._submit = submit
        self._reply = OutputCollector(submit.request, submit.sampling.seed)

    @property
    def result(self) -> Result | None:
        """The whole generation with its figures, once the last piece has come."""
        return self._reply.result

    @property
    def chosen(self) -> Sequence[Chosen]:
        """Tokens so far with their likelihoods, if they were asked for."""
        return self._reply.chosen

    async def __aiter__(self) -> AsyncIterator[str]:
        await self._socket.send(encode(self._submit, STAMP))
        try:
            while self.result is None:
                _, message = decode(await _next_frame(self._socket, self._address), ToClient)
                piece = self._reply.feed(message)
                if piece:
                    yield piece
        finally:
            if self.result is None:
                await self._socket.send(encode(Cancel(self._submit.request), STAMP))
            self._socket.close(linger=1000)


async def _next_frame(socket: zmq.asyncio.Socket, address: str) -> bytes:
    """The next frame. A pipeline that is silent for long is asked whether it is there; PipelineError if it is not."""
    if not await socket.poll(int(_SILENCE * 1000)):
        await socket.send(encode(Inquire(), STAMP))
        if not await socket.poll(int(_ANSWER * 1000)):
            raise NoPipeline(address)
    return await socket.recv()


def _received(link: Link, check: Callable[[float], float]) -> Iterator[list[ToClient]]:
    """Messages as they come, perhaps none, at least four times a second. `check`: see `Client._check`."""
    silent = 0.0
    while True:
        messages = link.receive(_GLANCE)
        silent = 0.0 if messages else check(silent + _GLANCE)
        yield messages


def _submit(prompt: Prompt | Prompts, params: SamplingParams | None) -> Submit:
    if len(prompt) and is_batch(prompt):
        raise InputError("A stream continues one prompt: give one, or a list of prompts to `generate`.")
    chosen = params or SamplingParams()
    submit = chosen.submit(uuid.uuid4().hex, cast("Prompt", prompt))
    _warn(chosen)
    return submit


def _warn(params: SamplingParams) -> None:
    """Tell the caller of a public method about options without effect."""
    values = {name: getattr(params, name) for name in _JUDGED}
    given = {name: name for name, value in values.items() if value != getattr(_DEFAULTS, name)}
    for sentence in ineffective(values, given):
        warnings.warn(sentence, IneffectiveOption, stacklevel=4)


def _one(params: SamplingParams | Sequence[SamplingParams] | None) -> SamplingParams | None:
    if isinstance(params, Sequence):
        raise InputError("There is one prompt and a list of SamplingParams: give one, or a list of prompts.")
    return params


def _names(count: int) -> list[str]:
    """Names for so many requests, which no other client has."""
    return [uuid.uuid4().hex for _ in range(count)]
