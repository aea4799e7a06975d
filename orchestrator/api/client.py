"""Clients of a running pipeline, in step or with asyncio. One socket a request, so that threads need no lock."""

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import zmq
import zmq.asyncio

from orchestrator.api.result import Chosen, OutputCollector, Result
from orchestrator.api.sampling_params import SamplingParams
from protocol.errors import PipelineError, blaming
from protocol.messages.base import SequenceId
from protocol.messages.client import Cancel, Inquire, PipelineState, Refused, Submit, ToClient
from protocol.messages.telemetry import TelemetryFrame, ToClientOrSubscriber, Watch
from protocol.transport.codec import Stamp, decode, encode
from protocol.transport.link import Link
from protocol.transport.sockets import connected_dealer

STAMP = Stamp(0, 0)
"""Clients belong to no life of the orchestrator."""
_GLANCE = 0.25
"""Seconds between looks at whether the pipeline still lives."""
_SILENCE = 2.0
"""Seconds of silence after which a pipeline is asked whether it is still there."""
_ANSWER = 3.0
"""Seconds that it has for an answer."""


class Client:
    """Talks to the pipeline at `address`, for instance "tcp://127.0.0.1:5570"."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._context: zmq.Context[Any] = zmq.Context.instance()

    def state(self, wait: float = _ANSWER) -> PipelineState:
        """What the pipeline is. Raises PipelineError if nobody answers within `wait` seconds."""
        link = Link(self._context, self.address, STAMP, ToClient)
        try:
            link.send(Inquire())
            for message in link.receive(wait):
                if isinstance(message, PipelineState):
                    return message
        finally:
            link.close()
        raise _nobody(self.address)

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> "Stream":
        """Continue `prompt` (text, or token ids): an iterator over pieces of text, with `.result` at its end."""
        submit = (params or SamplingParams()).submit(uuid.uuid4().hex, prompt)
        return Stream(Link(self._context, self.address, STAMP, ToClient), submit, self._check)

    def generate(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Result:
        """Continue `prompt` and return all of it with its figures."""
        with self.stream(prompt, params) as stream:
            for _ in stream:
                pass
            assert stream.result is not None
            return stream.result

    def _check(self, silent: float) -> float:
        """Raise PipelineError if the pipeline is not there; the seconds since its last sign of life, if it is.

        `silent`: seconds since the last sign of life so far.
        """
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
        """How many have come so far."""
        return self._reply.tokens

    @property
    def hit_rate(self) -> float | None:
        """Of the rounds so far; None where the strategy has no such thing."""
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
        """Cancel if unfinished, and let the socket go."""
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
        silent = 0.0
        try:
            while self.result is None:
                messages = self._link.receive(_GLANCE)
                silent = 0.0 if messages else silent + _GLANCE
                if not messages:
                    silent = self._check(silent)
                yield from filter(None, map(self._reply.feed, messages))
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
        raise _nobody(self.address)

    async def generate(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Result:
        """Continue `prompt` and return all of it with its figures."""
        stream = self.stream(prompt, params)
        async for _ in stream:
            pass
        assert stream.result is not None
        return stream.result

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> "AsyncStream":
        submit = (params or SamplingParams()).submit(uuid.uuid4().hex, prompt)
        return AsyncStream(self._context, self.address, submit)

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
                    raise _nobody(self.address)
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
                _, message = decode(await self._receive(), ToClient)
                piece = self._reply.feed(message)
                if piece:
                    yield piece
        finally:
            if self.result is None:
                await self._socket.send(encode(Cancel(self._submit.request), STAMP))
            self._socket.close(linger=1000)

    async def _receive(self) -> bytes:
        """The next frame; a pipeline that is silent for long is asked whether it still lives."""
        if not await self._socket.poll(int(_SILENCE * 1000)):
            await self._socket.send(encode(Inquire(), STAMP))
            if not await self._socket.poll(int(_ANSWER * 1000)):
                raise _nobody(self._address)
        return await self._socket.recv()


def _nobody(address: str) -> PipelineError:
    return PipelineError(
        f"No pipeline answers at {address}: start one with `launch-pipeline start --address {address}`."
    )
