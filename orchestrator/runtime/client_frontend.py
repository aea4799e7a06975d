"""The clients' socket: receives requests, sends output and answers. Knows no workers."""

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import zmq
from msgspec import structs

from orchestrator.core.commands import Emit, Finish, TellReading
from orchestrator.core.events import Ended, Submitted, Task
from orchestrator.core.request_stats import without_surplus
from orchestrator.runtime.hub import Arrival, Hub
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.runtime.telemetry import Subscribers
from orchestrator.text.stop_scanner import AnswerStops
from orchestrator.text.tokenizer import MOST_CHARACTERS, TextCodec, TextStream
from protocol.errors import InputError, PipelineError, blame_of, blaming
from protocol.messages.base import MAX_CONTEXT, RequestId
from protocol.messages.client import Cancel, Done, Inquire, Output, PipelineState, Reading, Refused, Statistics, Submit
from protocol.messages.sampling import ModelSampling, TokenLogprob
from protocol.messages.telemetry import FromClientOrSubscriber, Watch
from protocol.transport import Stamp

_MAX_REQUESTS = 256

ClientAddress: TypeAlias = tuple[bytes, Stamp]
"""The peer that an answer goes to, and the stamp that it must carry."""


class ClientFrontend:
    """The socket of all clients, and their requests."""

    def __init__(
        self,
        context: zmq.Context[Any],
        setup: OrchestratorSetup,
        codec: TextCodec,
        state: Callable[[], PipelineState],
        subscribers: Subscribers[ClientAddress],
    ) -> None:
        """`state` gives the answer to Inquire."""
        self._state = state
        self._sampling = setup.sampling
        self._codec = codec
        self._subscribers = subscribers
        # Telemetry holds the text of all requests: only the owner of the session's folder can reach this address.
        self._private = setup.address == Session(Path(setup.session)).client_address
        self._hub = Hub(context, setup.address, FromClientOrSubscriber, on_reject=self._reject_frame)
        self.socket = self._hub.socket
        self._requests: dict[RequestId, RequestState] = {}
        self._sequences = itertools.count(1)
        self.heard = time.monotonic()
        """When the last message came, or the last request ended."""
        self._inquirers: dict[bytes, Stamp] = {}
        """Clients that get the state again when the pipeline becomes ready or fails."""

    @property
    def idle(self) -> bool:
        return not self._requests

    def receive(self) -> Iterable[Submitted | Ended]:
        """Events of the state machine from the messages that have arrived."""
        for arrival in self._hub.receive():
            self.heard = time.monotonic()
            match arrival.message:
                case Inquire():
                    self._note_inquirer(arrival)
                    self._hub.send(arrival.peer, self._state(), arrival.stamp)
                case Submit() as submit:
                    yield from self._submit(arrival, submit)
                case Cancel(request):
                    for state in list(self._requests.values()):
                        if (state.peer, state.request) == (arrival.peer, request):
                            yield Ended(state.id, "cancelled")
                case Watch() as watch:
                    self._watch(arrival, watch)
                case _:
                    pass

    def emit(self, command: Emit) -> Ended | None:
        """Send committed tokens. Returns the end of the request if a stop string was found or the client is gone."""
        state = self._requests[command.request]
        if state.stopped:
            return None
        output = structs.replace(
            state.output(command.tokens, command.token_logprobs),
            prompt_token_logprobs=command.prompt_token_logprobs,
        )
        if not self._hub.send(state.peer, output, state.stamp):
            return Ended(command.request, "cancelled")
        if state.stopped:
            return Ended(command.request, "stop", surplus=len(command.tokens) - len(output.tokens))
        return None

    def tell_reading(self, command: TellReading) -> None:
        state = self._requests[command.request]
        self._hub.send(state.peer, Reading(state.request, command.tokens, command.total, command.queued), state.stamp)

    def finish(self, command: Finish) -> None:
        state = self._requests.pop(command.request)
        self.heard = time.monotonic()
        rest = state.rest()
        if rest is not None:
            self._hub.send(state.peer, rest, state.stamp)
        self._hub.send(state.peer, state.done(command.reason, command.statistics), state.stamp)

    def refuse(self, sequence: RequestId, error: PipelineError) -> None:
        self._refuse(self._requests.pop(sequence), error)

    def refuse_all(self, error: PipelineError) -> None:
        for sequence in list(self._requests):
            self.refuse(sequence, error)

    def notify_inquirers(self) -> None:
        """The pipeline has become ready, or failed."""
        state = self._state()
        for peer, stamp in self._inquirers.items():
            self._hub.send(peer, state, stamp)

    def send_telemetry(self, now: float) -> None:
        """Send the telemetry frames that are due."""
        for (peer, stamp), frame in self._subscribers.due(now):
            self._hub.send(peer, frame, stamp)

    def close(self) -> None:
        # libzmq's thread needs time to send the last frames.
        self._hub.close(linger=200)

    def _submit(self, arrival: Arrival, submit: Submit) -> Iterable[Submitted]:
        sequence = RequestId(next(self._sequences))
        state = RequestState.open(sequence, arrival.peer, arrival.stamp, submit, self._codec)
        try:
            pipeline = self._state()
            if pipeline.failure is not None:
                raise blaming(pipeline.blame, pipeline.failure)
            if len(self._requests) >= _MAX_REQUESTS:
                raise PipelineError(f"The pipeline already serves {_MAX_REQUESTS} requests: try again in a moment.")
            # It would be tokenized here, while all other requests wait.
            context = pipeline.context or MAX_CONTEXT
            if len(submit.prompt or "") > MOST_CHARACTERS * context:
                raise InputError(f"The prompt is far longer than the context of {context:,} tokens: shorten it.")
            request = to_request(submit, self._codec, self._sampling)
        except PipelineError as error:
            self._refuse(state, error)
            return
        self._requests[sequence] = state
        yield Submitted(sequence, request)

    def _watch(self, arrival: Arrival, watch: Watch) -> None:
        if self._private:
            self._subscribers.ask((arrival.peer, arrival.stamp), watch, time.monotonic())
            return
        error = InputError(
            "Other users can reach this pipeline's address, so it gives no telemetry: use `launch-pipeline serve`."
        )
        self._hub.send(arrival.peer, Refused("", str(error), blame_of(error)), arrival.stamp)

    def _note_inquirer(self, arrival: Arrival) -> None:
        """Remember a client for `notify_inquirers`; only the latest, because a client does not say when it leaves."""
        self._inquirers.pop(arrival.peer, None)
        self._inquirers[arrival.peer] = arrival.stamp
        if len(self._inquirers) > _MAX_REQUESTS:
            del self._inquirers[next(iter(self._inquirers))]

    def _refuse(self, state: "RequestState", error: PipelineError) -> None:
        self._hub.send(state.peer, Refused(state.request, str(error)[:4000], blame_of(error)), state.stamp)

    def _reject_frame(self, peer: bytes, text: str) -> None:
        self._hub.send(peer, Refused("", text[:4000], "pipeline"), Stamp(0, 0))


# One request: between its client's text and the state machine's tokens ----------------------------


@dataclass(slots=True)
class RequestState:
    """A request, its client, and the text that was sent so far."""

    id: RequestId
    peer: bytes
    stamp: Stamp
    request: str
    """The client's own id."""
    text: TextStream
    stops: AnswerStops
    stopped: bool = False
    """A stop string was found: no further text is sent."""
    sent_tokens: int = 0

    @classmethod
    def open(cls, sequence: RequestId, peer: bytes, stamp: Stamp, submit: Submit, codec: TextCodec) -> "RequestState":
        return cls(
            sequence,
            peer,
            stamp,
            submit.request,
            codec.stream(frozenset(submit.shown), frozenset(submit.marked)),
            AnswerStops(submit.stop, submit.thought),
        )

    def output(self, tokens: tuple[int, ...], token_logprobs: tuple[TokenLogprob, ...] = ()) -> Output:
        """The text that `tokens` complete, up to a stop string if there is one."""
        texts: list[str] = []
        used = 0
        for token in tokens:
            text, self.stopped = self.stops.push(self.text.push([token]))
            texts.append(text)
            used += 1
            if self.stopped:
                break
        self.sent_tokens += used
        return Output(self.request, "".join(texts), tokens[:used], token_logprobs[:used])

    def rest(self) -> Output | None:
        """The text that was held back as a possible part of a stop string or character, if any."""
        if self.stopped:
            return None
        text, self.stopped = self.stops.push(self.text.finish())
        text += self.stops.flush()
        return Output(self.request, text, ()) if text else None

    def done(self, reason: Literal["stop", "length", "cancelled"], statistics: Statistics) -> Done:
        """The last message. Tokens that a stop string cut off in the last commit are not counted."""
        sent = without_surplus(statistics, statistics.generated_tokens - self.sent_tokens)
        return Done(self.request, "stop" if self.stopped else reason, sent, self.stops.found)


def to_request(submit: Submit, codec: TextCodec, own: ModelSampling) -> Task:
    """The request in tokens, with the target's `own` sampling values for those that it leaves open. Raises InputError
    if it has no tokens."""
    if (submit.prompt is None) == (submit.tokens is None):
        raise InputError("A request needs either a prompt or tokens, not both.")
    tokens = tuple(codec.encode(submit.prompt)) if submit.prompt is not None else submit.tokens
    if not tokens:
        raise InputError("The prompt is empty: give at least one token to continue.")
    sampling = submit.sampling.resolved(own)
    task = Task(tokens, sampling, submit.max_tokens, codec.eos, submit.draft_tokens, submit.shared_prefix)
    return replace(task, background=submit.background, seeded=submit.seeded, name=submit.request)
