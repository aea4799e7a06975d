"""The blocking client of a running pipeline. One socket a call, so that threads need no lock."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import zmq

from orchestrator.api.result import OutputCollector, Result
from orchestrator.api.sampling import SamplingParams
from orchestrator.api.submission import Prompt, Prompts, RequestBatch, is_batch, one_submit, submits
from orchestrator.text.chat_template import ChatMessage, chat_prompt
from protocol.errors import PipelineError
from protocol.messages.client import Cancel, Inquire, PipelineState, Submit, ToClient
from protocol.transport import Link, Stamp

STAMP = Stamp(0, 0)
"""Clients belong to no life of the orchestrator."""
SILENCE_SECONDS = 2.0
"""After such a time without a message, a client asks the pipeline for its state."""
ANSWER_SECONDS = 3.0
"""Limit for the answer."""
BUSY_ANSWER_SECONDS = 8.0
"""The same from a pipeline that is at work: a busy machine may stop it for a while, and that ends nothing."""
_POLL_SECONDS = 0.25


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

    def state(self, wait: float = ANSWER_SECONDS) -> PipelineState:
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

    def chat_prompt(self, messages: str | Sequence[ChatMessage]) -> list[int]:
        """A conversation in tokens for `generate` and `stream`; a text is its only message.

        Raises InputError if the target has no chat template, refuses the messages, or is not on this machine.
        """
        return chat_prompt(self.state().target, messages)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> "Stream":
        """Continue `prompt`: an iterator over pieces of text, with `.result` at its end."""
        return self._open(one_submit(prompt, params))

    @overload
    def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Result: ...
    @overload
    def generate(
        self, prompt: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]: ...
    @overload
    def generate(
        self, prompt: Prompt | Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Result | list[Result]: ...
    def generate(
        self, prompt: Prompt | Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Result | list[Result]:
        """Continue `prompt` and return all of it with its figures.

        A list of prompts gives a list of results in the same order; `params` are then for all, or one for each. The
        requests are decoded together. If one fails, or the call is interrupted, the others are cancelled.
        """
        if is_batch(prompt):
            return self._generate_all(prompt, params)
        with self._open(one_submit(prompt, params)) as stream:
            for _ in stream:
                pass
            assert stream.result is not None
            return stream.result

    def _generate_all(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Result]:
        batch = RequestBatch(submits(prompts, params))
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
        if silent < SILENCE_SECONDS:
            return silent
        self.state(BUSY_ANSWER_SECONDS)
        return 0.0


class Stream(OutputCollector):
    """Pieces of text as they come. Closing it early cancels the request."""

    def __init__(self, link: Link, submit: Submit, check: Callable[[float], float]) -> None:
        super().__init__(submit.request, submit.sampling.seed)
        self._link = link
        self._check = check
        self._pieces = self._run(submit)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def cancel(self) -> None:
        """Ask the pipeline to end the request; the iterator then ends with what there is."""
        self._link.send(Cancel(self.request))

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
                yield from filter(None, map(self.feed, next(messages)))
        finally:
            self.close()


def _received(link: Link, check: Callable[[float], float]) -> Iterator[list[ToClient]]:
    """Messages as they come, perhaps none, at least four times a second. `check`: see `Client._check`."""
    silent = 0.0
    while True:
        messages = link.receive(_POLL_SECONDS)
        silent = 0.0 if messages else check(silent + _POLL_SECONDS)
        yield messages
