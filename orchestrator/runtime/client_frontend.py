"""Clients' side of the orchestrator: requests in, pieces of text and answers out. Knows no workers."""

import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import zmq

from orchestrator.core.commands import Emit, Finish
from orchestrator.core.events import Ended, Submitted
from orchestrator.core.telemetry.watchers import Watchers
from orchestrator.runtime.request_state import RequestState, to_request
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import InputError, PipelineError, blame_of, blaming
from protocol.messages.base import SequenceId
from protocol.messages.client import Cancel, Inquire, PipelineState, Refused, Submit
from protocol.messages.telemetry import FromClientOrWatcher, Watch
from protocol.transport.codec import Stamp
from protocol.transport.sockets import Arrival, Hub

_MOST_REQUESTS = 256

ClientAddress: TypeAlias = tuple[bytes, Stamp]
"""Who asked, and the stamp that the answer is to have."""


class ClientFrontend:
    """One socket and the conversations on it."""

    def __init__(
        self,
        context: zmq.Context[Any],
        setup: OrchestratorSetup,
        codec: TextCodec,
        state: Callable[[], PipelineState],
        watchers: Watchers[ClientAddress],
    ) -> None:
        """`state` says what clients are told of the pipeline."""
        self._state = state
        self._options = setup.options
        self._codec = codec
        self._watchers = watchers
        # Watchers see what others ask: only who may open a socket in the session's folder, which is its owner.
        self._private = setup.address == Session(Path(setup.session)).client_address
        self._hub = Hub(context, setup.address, FromClientOrWatcher, on_reject=self._reject_frame)
        self._conversations: dict[SequenceId, RequestState] = {}
        self._sequences = itertools.count(1)
        self._inquirers: dict[bytes, Stamp] = {}

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._hub.socket

    @property
    def idle(self) -> bool:
        return not self._conversations

    def receive(self) -> Iterable[Submitted | Ended]:
        """What clients want of the state machine."""
        for arrival in self._hub.receive():
            match arrival.message:
                case Inquire():
                    self._note_inquirer(arrival)
                    self._hub.send(arrival.peer, self._state(), arrival.stamp)
                case Submit() as submit:
                    yield from self._submit(arrival, submit)
                case Cancel(request):
                    for conversation in list(self._conversations.values()):
                        if (conversation.peer, conversation.request) == (arrival.peer, request):
                            yield Ended(conversation.sequence, "cancelled")
                case Watch() as watch:
                    self._watch(arrival, watch)
                case _:
                    pass

    def _watch(self, arrival: Arrival, watch: Watch) -> None:
        if self._private:
            self._watchers.ask((arrival.peer, arrival.stamp), watch, time.monotonic())
            return
        reason = (
            "This pipeline's address is open to others, whose requests nobody may watch: use `launch-pipeline serve`."
        )
        refused = Refused("", reason, blame_of(InputError(reason)))
        self._hub.send(arrival.peer, refused, arrival.stamp)

    def tell_watchers(self, now: float) -> None:
        """Show what is due to whoever watches."""
        for (peer, stamp), scene in self._watchers.due(now):
            self._hub.send(peer, scene, stamp)

    def _note_inquirer(self, arrival: Arrival) -> None:
        """Clients come and go without a word: only the latest are told when something changes."""
        self._inquirers.pop(arrival.peer, None)
        self._inquirers[arrival.peer] = arrival.stamp
        if len(self._inquirers) > _MOST_REQUESTS:
            del self._inquirers[next(iter(self._inquirers))]

    def _submit(self, arrival: Arrival, submit: Submit) -> Iterable[Submitted]:
        sequence = SequenceId(next(self._sequences))
        conversation = RequestState.open(sequence, arrival.peer, arrival.stamp, submit, self._codec)
        try:
            state = self._state()
            if state.failure is not None:
                raise blaming(state.blame, state.failure)
            if len(self._conversations) >= _MOST_REQUESTS:
                raise PipelineError(f"The pipeline already serves {_MOST_REQUESTS} requests: try again in a moment.")
            request = to_request(submit, self._codec, self._options)
        except PipelineError as error:
            self._answer(conversation, error)
            return
        self._conversations[sequence] = conversation
        yield Submitted(sequence, request)

    def emit(self, command: Emit) -> Ended | None:
        """Hand over committed tokens; the end of the request if they were its last, or nobody takes them."""
        sequence = command.sequence
        conversation = self._conversations[sequence]
        if conversation.stopped:
            return None
        piece = conversation.piece(command.tokens, command.hit, command.likelihoods)
        if not self._hub.send(conversation.peer, piece, conversation.stamp):
            return Ended(sequence, "cancelled")
        if conversation.stopped:
            return Ended(sequence, "stop", surplus=len(command.tokens) - len(piece.tokens))
        return None

    def finish(self, command: Finish) -> None:
        conversation = self._conversations.pop(command.sequence)
        rest = conversation.rest()
        if rest is not None:
            self._hub.send(conversation.peer, rest, conversation.stamp)
        done = conversation.done(command.reason, command.statistics)
        self._hub.send(conversation.peer, done, conversation.stamp)

    def refuse(self, sequence: SequenceId, error: PipelineError) -> None:
        self._answer(self._conversations.pop(sequence), error)

    def refuse_all(self, error: PipelineError) -> None:
        for sequence in list(self._conversations):
            self.refuse(sequence, error)

    def tell_inquirers(self) -> None:
        """The pipeline has become ready, or failed."""
        state = self._state()
        for peer, stamp in self._inquirers.items():
            self._hub.send(peer, state, stamp)

    def close(self) -> None:
        # Give ZeroMQ's thread the moment it needs to hand over the last frames.
        self._hub.close(linger=200)

    def _answer(self, conversation: RequestState, error: PipelineError) -> None:
        refused = Refused(conversation.request, str(error)[:4000], blame_of(error))
        self._hub.send(conversation.peer, refused, conversation.stamp)

    def _reject_frame(self, peer: bytes, text: str) -> None:
        self._hub.send(peer, Refused("", text[:4000], "pipeline"), Stamp(0, 0))
