"""The client of a running pipeline for asyncio. One socket a call."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import zmq.asyncio

from orchestrator.api.client import ANSWER_SECONDS, BUSY_ANSWER_SECONDS, SILENCE_SECONDS, STAMP, NoPipeline
from orchestrator.api.result import OutputCollector, Result
from orchestrator.api.sampling import SamplingParams
from orchestrator.api.submission import Prompt, Prompts, RequestBatch, is_batch, one_submit, submits
from orchestrator.text.chat_template import ChatMessage, chat_prompt
from protocol.errors import blaming
from protocol.messages.base import RequestId
from protocol.messages.client import Cancel, Inquire, PipelineState, Refused, Submit, ToClient
from protocol.messages.telemetry import TelemetryFrame, ToClientOrSubscriber, Watch
from protocol.transport import connected_dealer, decode, encode


class AsyncClient:
    """`Client` for asyncio: `async for piece in client.stream(prompt, params)`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._context = zmq.asyncio.Context()

    async def state(self, wait: float = ANSWER_SECONDS) -> PipelineState:
        """What the pipeline is. Raises PipelineError if the pipeline does not answer within `wait` seconds."""
        with _connected(self._context, self.address) as socket:
            await socket.send(encode(Inquire(), STAMP))
            while await socket.poll(int(wait * 1000)):
                _, message = decode(await socket.recv(), ToClient)
                if isinstance(message, PipelineState):
                    return message
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
        stream = AsyncStream(self._context, self.address, one_submit(prompt, params))
        async for _ in stream:
            pass
        assert stream.result is not None
        return stream.result

    async def _generate_all(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Result]:
        batch = RequestBatch(submits(prompts, params))
        if (results := batch.results) is not None:
            return results
        with _connected(self._context, self.address, linger=1000) as socket:
            try:
                while (results := batch.results) is None:
                    for submit in batch.due():
                        await socket.send(encode(submit, STAMP))
                    _, message = decode(await _next_frame(socket, self.address), ToClient)
                    batch.feed(message)
                return results
            finally:
                for cancel in () if socket.closed else batch.cancellations():
                    await socket.send(encode(cancel, STAMP))

    async def chat_prompt(self, messages: str | Sequence[ChatMessage]) -> list[int]:
        """A conversation in tokens, as `Client.chat_prompt` gives them."""
        return chat_prompt((await self.state()).target, messages)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> "AsyncStream":
        """Continue `prompt`: an asynchronous iterator over pieces of text, with `.result` at its end."""
        return AsyncStream(self._context, self.address, one_submit(prompt, params))

    async def watch(self, sequence: RequestId | None = None) -> AsyncGenerator[TelemetryFrame, None]:
        """Telemetry frames: at most 20 a second, and about one a second if nothing happens.

        `sequence` is the request to show in detail; None is the latest. A slow reader misses frames. Raises
        PipelineError if no pipeline answers, or if its address is not this user's private one.
        """
        after = 0
        with _connected(self._context, self.address) as socket:
            while True:
                await socket.send(encode(Watch(after, sequence), STAMP))
                if not await socket.poll(int(ANSWER_SECONDS * 1000)):
                    raise NoPipeline(self.address)
                _, answer = decode(await socket.recv(), ToClientOrSubscriber)
                if isinstance(answer, Refused):
                    raise blaming(answer.blame, answer.text)
                if isinstance(answer, TelemetryFrame):
                    after = answer.serial
                    yield answer

    def close(self) -> None:
        """Calls in progress end with PipelineError, and so do later ones."""
        self._context.destroy(linger=0)


class AsyncStream(OutputCollector):
    """Pieces of text as they come; leaving the loop early cancels the request."""

    def __init__(self, context: zmq.asyncio.Context, address: str, submit: Submit) -> None:
        super().__init__(submit.request, submit.sampling.seed)
        self._context = context
        self._address = address
        self._submit = submit

    async def __aiter__(self) -> AsyncIterator[str]:
        with _connected(self._context, self._address, linger=1000) as socket:
            await socket.send(encode(self._submit, STAMP))
            try:
                while self.result is None:
                    _, message = decode(await _next_frame(socket, self._address), ToClient)
                    piece = self.feed(message)
                    if piece:
                        yield piece
            finally:
                if self.result is None and not socket.closed:
                    await socket.send(encode(Cancel(self._submit.request), STAMP))


@contextmanager
def _connected(context: zmq.asyncio.Context, address: str, *, linger: int = 0) -> Iterator[zmq.asyncio.Socket]:
    """The socket of one call, which sends for `linger` ms after it. Raises NoPipeline if the client is closed."""
    if context.closed:
        raise NoPipeline(address)
    socket = connected_dealer(context, address)
    try:
        yield socket
    except (asyncio.CancelledError, zmq.ZMQError) as error:
        # libzmq's way to say that the socket was closed while it was read.
        task = asyncio.current_task()
        if socket.closed and not (task is not None and task.cancelling()):
            raise NoPipeline(address) from error
        raise
    finally:
        socket.close(linger=linger)


async def _next_frame(socket: zmq.asyncio.Socket, address: str) -> bytes:
    """The next frame. A pipeline that is silent for long is asked whether it is there; PipelineError if it is not."""
    if not await socket.poll(int(SILENCE_SECONDS * 1000)):
        await socket.send(encode(Inquire(), STAMP))
        if not await socket.poll(int(BUSY_ANSWER_SECONDS * 1000)):
            raise NoPipeline(address)
    return await socket.recv()
